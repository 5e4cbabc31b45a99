//! Whether a snapshot shows a transaction of which only the 32-bit id is known.

/// Whether `snapshot` (`xmin:xmax:xip,…`, 64-bit ids) shows transaction `xid`, which is known to have committed: the answer
/// of `pg_visible_in_snapshot`. `None` if the snapshot cannot be read.
///
/// The epoch is derived from the snapshot's xmax, the next id to be given out: transactions that run or have just
/// committed are within 2³¹ of it, on either side, because an id may be in use that is not below xmax yet.
pub(super) fn shows(snapshot: &str, xid: u32) -> Option<bool> {
    let mut parts = snapshot.split(':');
    let (xmin, xmax, running) = (parts.next()?, parts.next()?, parts.next()?);
    let (xmin, xmax): (u64, u64) = (xmin.parse().ok()?, xmax.parse().ok()?);
    let ahead = xid.wrapping_sub(xmax as u32).cast_signed();
    let full = xmax.wrapping_add_signed(i64::from(ahead));
    let listed = || running.split(',').filter_map(|id| id.parse::<u64>().ok()).any(|id| id == full);
    Some(full < xmin || (full < xmax && !listed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_transaction_and_a_later_one_are_not_shown() {
        assert_eq!(shows("100:110:100,105", 99), Some(true));
        assert_eq!(shows("100:110:100,105", 100), Some(false));
        assert_eq!(shows("100:110:100,105", 101), Some(true));
        assert_eq!(shows("100:110:100,105", 105), Some(false));
        assert_eq!(shows("100:110:100,105", 110), Some(false));
        assert_eq!(shows("100:110:", 109), Some(true));
    }

    #[test]
    fn ids_around_the_wrap_keep_their_epoch() {
        let wrap = 3u64 << 32;
        let snapshot = format!("{}:{}:{}", wrap - 2, wrap + 5, wrap - 2);
        assert_eq!(shows(&snapshot, u32::MAX - 1), Some(false));
        assert_eq!(shows(&snapshot, u32::MAX), Some(true));
        assert_eq!(shows(&snapshot, 3), Some(true));
        let before = format!("{}:{}:", wrap - 3, wrap - 3);
        assert_eq!(shows(&before, 3), Some(false), "ahead of xmax, in the next epoch");
    }

    #[test]
    fn what_is_no_snapshot_is_no_answer() {
        for text in ["", "1:2", "a:b:c"] {
            assert_eq!(shows(text, 1), None, "{text}");
        }
    }
}
