//! Values on the wire that tokio-postgres has no type for.

use std::error::Error;

use bytes::{BufMut, BytesMut};
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

use crate::envelope::UnixMicros;

/// 2000-01-01, where PostgreSQL counts from, in microseconds since 1970.
const POSTGRES_EPOCH: i64 = 946_684_800_000_000;

/// A column's bytes as they are: the text of a text column, the content of a `bytea`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Raw<'a>(pub(crate) &'a [u8]);

impl<'a> FromSql<'a> for Raw<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(raw))
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::TEXT | Type::VARCHAR | Type::BYTEA)
    }
}

/// A `timestamptz`, or a `timestamp` read as UTC: both travel as microseconds since 2000.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Time {
    /// `-infinity`.
    Earliest,
    /// A moment.
    At(UnixMicros),
    /// `infinity`.
    Latest,
}

impl Time {
    /// The moment, unless it is infinite.
    pub(crate) fn micros(self) -> Option<UnixMicros> {
        match self {
            Time::At(micros) => Some(micros),
            Time::Earliest | Time::Latest => None,
        }
    }
}

impl FromSql<'_> for Time {
    fn from_sql(_: &Type, raw: &[u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(match i64::from_be_bytes(raw.try_into()?) {
            i64::MIN => Time::Earliest,
            i64::MAX => Time::Latest,
            since_2000 => Time::At(since_2000.saturating_add(POSTGRES_EPOCH)),
        })
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::TIMESTAMPTZ | Type::TIMESTAMP)
    }
}

impl ToSql for Time {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.put_i64(match *self {
            Time::Earliest => i64::MIN,
            Time::At(micros) => micros.saturating_sub(POSTGRES_EPOCH),
            Time::Latest => i64::MAX,
        });
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        <Self as FromSql>::accepts(ty)
    }

    to_sql_checked!();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_survives_the_wire() {
        for time in [Time::Earliest, Time::At(0), Time::At(-1), Time::At(1_790_000_000_000_001), Time::Latest]
        {
            let mut wire = BytesMut::new();
            time.to_sql(&Type::TIMESTAMPTZ, &mut wire).unwrap();
            assert_eq!(Time::from_sql(&Type::TIMESTAMPTZ, &wire).unwrap(), time);
        }
    }
}
