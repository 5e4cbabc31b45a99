//! PostgreSQL's ISO text of a time, as microseconds since 1970.
//!
//! The session asks for `DateStyle = ISO` and `TimeZone = UTC`, so this is the one form there is:
//! `2026-01-02 03:04:05.123456+00`, without the zone for `timestamp`, which is read as UTC. Years have four digits or
//! more, and ` BC` may follow.

use crate::envelope::UnixMicros;

const SECOND: i64 = 1_000_000;
const DAY: i64 = 86_400 * SECOND;

/// Reads `text`. `None` where it is no such time, or one that microseconds in 64 bits cannot hold: `infinity`,
/// `-infinity`, and years beyond 294,247. The message then carries no timestamp; nothing else depends on it.
pub fn parse(text: &[u8]) -> Option<UnixMicros> {
    let (text, before_christ) = match text.strip_suffix(b" BC") {
        Some(text) => (text, true),
        None => (text, false),
    };
    let mut reader = Reader(text);
    let year = reader.digits(4, 6)?;
    let month = reader.after(b'-')?.digits(2, 2)?;
    let day = reader.after(b'-')?.digits(2, 2)?;
    let hour = reader.after(b' ')?.digits(2, 2)?;
    let minute = reader.after(b':')?.digits(2, 2)?;
    let second = reader.after(b':')?.digits(2, 2)?;
    let fraction = if reader.skip(b'.') { reader.fraction()? } else { 0 };
    let zone = reader.zone()?;
    // There is no year 0: 1 BC comes before AD 1.
    let year = if before_christ { 1 - year } else { year };
    let in_range = (1..=12).contains(&month)
        && (1..=days_of(year, month)).contains(&day)
        && hour <= 24
        && minute <= 59
        && second <= 60;
    if !in_range || !reader.0.is_empty() {
        return None;
    }
    let of_day = (hour * 3600 + minute * 60 + second) * SECOND + fraction;
    days_since_1970(year, month, day).checked_mul(DAY)?.checked_add(of_day)?.checked_sub(zone * SECOND)
}

fn days_of(year: i64, month: i64) -> i64 {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days from 1970-01-01 to a date of the proleptic Gregorian calendar. A year begins in March here, so that the leap
/// day is its last.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn skip(&mut self, byte: u8) -> bool {
        match self.0.split_first() {
            Some((first, rest)) if *first == byte => {
                self.0 = rest;
                true
            }
            _ => false,
        }
    }

    fn after(&mut self, byte: u8) -> Option<&mut Self> {
        self.skip(byte).then_some(self)
    }

    /// A number of `least` to `most` digits.
    fn digits(&mut self, least: usize, most: usize) -> Option<i64> {
        let length = self.0.iter().take(most).take_while(|byte| byte.is_ascii_digit()).count();
        if length < least {
            return None;
        }
        let (digits, rest) = self.0.split_at(length);
        self.0 = rest;
        Some(digits.iter().fold(0, |number, digit| number * 10 + i64::from(digit - b'0')))
    }

    /// One to six digits after the point, as microseconds.
    fn fraction(&mut self) -> Option<i64> {
        let before = self.0.len();
        let number = self.digits(1, 6)?;
        let missing = 6 - (before - self.0.len());
        Some(number * 10_i64.pow(missing as u32))
    }

    /// `+HH`, `+HH:MM` or `+HH:MM:SS` as seconds east of UTC; 0 where there is none.
    fn zone(&mut self) -> Option<i64> {
        let sign = match () {
            () if self.skip(b'+') => 1,
            () if self.skip(b'-') => -1,
            () => return Some(0),
        };
        let mut seconds = self.digits(2, 2)? * 3600;
        for unit in [60, 1] {
            if self.skip(b':') {
                seconds += self.digits(2, 2)? * unit;
            }
        }
        Some(sign * seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(text: &str) -> Option<i64> {
        parse(text.as_bytes())
    }

    #[test]
    fn times_are_read_in_the_forms_the_server_writes() {
        assert_eq!(at("1970-01-01 00:00:00+00"), Some(0));
        assert_eq!(at("2026-01-02 03:04:05.123456+00"), Some(1_767_323_045_123_456));
        assert_eq!(at("2026-01-02 03:04:05.5"), Some(1_767_323_045_500_000));
        assert_eq!(at("2026-01-02 05:34:05.5+02:30"), Some(1_767_323_045_500_000));
        assert_eq!(at("2024-02-29 00:00:00+00"), Some(1_709_164_800_000_000));
        assert_eq!(at("1969-12-31 23:59:59.999999+00"), Some(-1));
        assert_eq!(at("0001-01-01 00:00:00+00"), Some(-62_135_596_800_000_000));
        assert_eq!(at("0001-12-31 00:00:00+00 BC"), Some(-62_135_683_200_000_000));
        assert_eq!(at("10000-01-01 00:00:00+00"), Some(253_402_300_800_000_000));
        assert_eq!(at("294246-12-31 23:59:59.999999+00"), Some(9_223_371_244_799_999_999));
    }

    #[test]
    fn what_is_no_time_or_too_far_away_is_none() {
        for text in [
            "",
            "infinity",
            "-infinity",
            "294276-12-31 23:59:59.999999+00",
            "2026-02-29 00:00:00+00",
            "2026-13-01 00:00:00+00",
            "2026-01-02T03:04:05+00",
            "2026-01-02 03:04+00",
            "2026-01-02 03:04:05.+00",
            "2026-01-02 03:04:05.1234567+00",
            "2026-01-02 03:04:05+00 AD",
            "01/02/2026 03:04:05",
        ] {
            assert_eq!(at(text), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "[0-9:. +BC-]{0,40}") {
            let _ = at(&text);
        }

        #[test]
        fn days_follow_one_another(year in -4713i64..294_276, month in 1i64..=12, day in 1i64..=31) {
            prop_assume!(day <= days_of(year, month));
            let (next_year, next_month, next_day) = match (day == days_of(year, month), month) {
                (false, _) => (year, month, day + 1),
                (true, 12) => (year + 1, 1, 1),
                (true, _) => (year, month + 1, 1),
            };
            let next = days_since_1970(next_year, next_month, next_day);
            prop_assert_eq!(next, days_since_1970(year, month, day) + 1);
        }
    }
}
