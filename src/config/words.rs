//! The keys that take one of a few words.

/// Declares an enum whose values are words; an unknown word is answered with all that are allowed.
macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// The word that stands for it in the configuration.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let word = String::deserialize(deserializer)?;
                match word.as_str() {
                    $($word => Ok(Self::$variant),)+
                    _ => {
                        let allowed = [$(concat!("\"", $word, "\"")),+].join(", ");
                        Err(serde::de::Error::custom(format!("found {word:?}, allowed: {allowed}")))
                    }
                }
            }
        }
    };
}

words! {
    /// `source.mode`
    SourceMode {
        /// A logical replication slot streams committed inserts.
        Wal = "wal",
        /// Workers claim rows.
        Poll = "poll",
    }
}

words! {
    /// `database.sslmode`, with libpq's meanings
    SslMode {
        /// Never.
        Disable = "disable",
        /// Where the server offers it, unverified.
        Prefer = "prefer",
        /// Always; verified where `database.ca_file` is set.
        Require = "require",
        /// Always, by a trusted authority.
        VerifyCa = "verify-ca",
        /// Always, by a trusted authority and for this host.
        VerifyFull = "verify-full",
    }
}

impl From<SslMode> for postrider_actors::database::SslMode {
    fn from(mode: SslMode) -> Self {
        match mode {
            SslMode::Disable => Self::Disable,
            SslMode::Prefer => Self::Prefer,
            SslMode::Require => Self::Require,
            SslMode::VerifyCa => Self::VerifyCa,
            SslMode::VerifyFull => Self::VerifyFull,
        }
    }
}

words! {
    /// `source.wal.on_lost_slot`
    OnLostSlot {
        /// Stay up, not ready, and say what to do.
        Halt = "halt",
        /// Sweep and go on with a new slot.
        Recover = "recover",
    }
}

words! {
    /// `source.wal.first_start`
    FirstStart {
        /// Deliver what was waiting before the first start.
        Sweep = "sweep",
        /// Begin with what commits from now on.
        Stream = "stream",
    }
}

words! {
    /// `source.poll.wake`
    Wake {
        /// Look again every `interval_ms`.
        Poll = "poll",
        /// Listen on channel `postrider` as well.
        Notify = "notify",
    }
}

words! {
    /// `ack.rows`
    AckRows {
        /// Set `processed_on`.
        Update = "update",
        /// Delete the row.
        Delete = "delete",
        /// Leave the row alone (`wal` only).
        Keep = "keep",
    }
}
