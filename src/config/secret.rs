//! Connection URLs, which hold passwords: whatever is printed of one has the password masked.

use std::fmt;

use serde::{Deserialize, Serialize, Serializer};

/// What stands for a password.
const MASK: &str = "***";

/// A connection URL. `Display`, `Debug` and `Serialize` mask its password; [`Url::expose`] does not.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Url(String);

impl Url {
    /// The URL as it was given, for connecting.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The URL with its password masked.
    pub fn masked(&self) -> String {
        let Some((scheme, rest)) = self.0.split_once("://") else {
            // `host=… password=…`: nothing of it is worth the risk of parsing it wrong.
            return "(key/value connection string)".to_owned();
        };
        let (address, query) =
            rest.split_once('?').map_or((rest, None), |(address, query)| (address, Some(query)));
        // The last `@`, wherever it is: a password with an unescaped slash is masked too.
        let address = match address.rsplit_once('@') {
            Some((login, host)) => match login.split_once(':') {
                Some((user, _)) => format!("{user}:{MASK}@{host}"),
                None => format!("{login}@{host}"),
            },
            None => address.to_owned(),
        };
        let query = query.map(|query| {
            let parts = query.split('&').map(|part| match part.split_once('=') {
                Some((name, _)) if name.to_ascii_lowercase().contains("password") => format!("{name}={MASK}"),
                _ => part.to_owned(),
            });
            format!("?{}", parts.collect::<Vec<_>>().join("&"))
        });
        format!("{scheme}://{address}{}", query.unwrap_or_default())
    }
}

impl From<&str> for Url {
    fn from(url: &str) -> Self {
        Self(url.to_owned())
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.masked())
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.masked())
    }
}

impl Serialize for Url {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.masked())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_form_of_a_url_shows_its_password() {
        for (url, shown) in [
            ("postgres://u:geheim@h:1/db", "postgres://u:***@h:1/db"),
            ("postgres://u:ge/hei@m@h/db?connect_timeout=5", "postgres://u:***@h/db?connect_timeout=5"),
            ("postgres://h/db?user=u&password=geheim", "postgres://h/db?user=u&password=***"),
            ("amqp://u@h/%2f", "amqp://u@h/%2f"),
            ("host=h user=u password=geheim", "(key/value connection string)"),
        ] {
            assert_eq!(Url::from(url).to_string(), shown);
            assert_eq!(format!("{:?}", Url::from(url)), shown);
        }
    }
}
