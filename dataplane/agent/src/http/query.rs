// SPDX-License-Identifier: Apache-2.0
//! Query strings.

/// The parameters of a query string, decoded.
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Reads a raw query string.
    pub fn parse(raw: Option<&str>) -> Self {
        let pairs = form_urlencoded::parse(raw.unwrap_or_default().as_bytes());
        Self(
            pairs
                .map(|(k, v)| (k.into_owned(), v.into_owned()))
                .collect(),
        )
    }

    /// The first value of a parameter, if it is there (it may be empty).
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// Every value of a parameter, in order.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let of_name = move |(key, _): &&(String, String)| key == name;
        self.0
            .iter()
            .filter(of_name)
            .map(|(_, value)| value.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_plus_percent_and_takes_the_first() {
        let query = Query::parse(Some("path=%2Fa%20b+c&path=/x&username="));
        assert_eq!(query.get("path"), Some("/a b c"));
        assert_eq!(query.get("username"), Some(""));
        assert_eq!(query.get("signature"), None);
        assert!(query.all("path").eq(["/a b c", "/x"]));
    }
}
