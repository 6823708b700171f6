//! [`Place`]: a path in a configuration, such as `/targets/demo/luns/0`.

use std::fmt;
use std::str::FromStr;

/// A path from the top of a configuration. Items of lists stand by their names where they have some
/// (targets and users by theirs, portals as `iscsi:192.0.2.10:3260`), else by their numbers from 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place(Vec<String>);

impl Place {
    /// The names along the path.
    #[must_use]
    pub fn segments(&self) -> &[String] {
        &self.0
    }

    /// A place beneath.
    #[must_use]
    pub fn join(&self, segment: &str) -> Self {
        let mut segments = self.0.clone();
        segments.push(segment.to_owned());
        Self(segments)
    }

    /// The place above and the name from there; `None` at the top.
    #[must_use]
    pub fn split_last(&self) -> Option<(Self, &str)> {
        let (last, rest) = self.0.split_last()?;
        Some((Self(rest.to_vec()), last))
    }
}

impl FromStr for Place {
    type Err = String;

    /// Takes `/a/b`, with or without the first or a last slash.
    fn from_str(text: &str) -> Result<Self, String> {
        let inner = text.strip_prefix('/').unwrap_or(text);
        let inner = inner.strip_suffix('/').unwrap_or(inner);
        if inner.is_empty() {
            return Ok(Self::default());
        }
        let segments: Vec<String> = inner.split('/').map(str::to_owned).collect();
        if segments.iter().any(String::is_empty) {
            return Err(format!("`{text}` is not a path: a name in it is empty"));
        }
        Ok(Self(segments))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("/");
        }
        self.0
            .iter()
            .try_for_each(|segment| write!(f, "/{segment}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_as_they_are_written() {
        for (text, shown) in [
            ("/", "/"),
            ("", "/"),
            ("/targets/demo/", "/targets/demo"),
            ("backends", "/backends"),
            (
                "/targets/a/portals/srp:[::1]:5555",
                "/targets/a/portals/srp:[::1]:5555",
            ),
        ] {
            assert_eq!(text.parse::<Place>().unwrap().to_string(), shown);
        }
        assert!("/targets//demo".parse::<Place>().is_err());
        let place: Place = "/a/b".parse().unwrap();
        let (above, name) = place.split_last().unwrap();
        assert_eq!((above.to_string().as_str(), name), ("/a", "b"));
        assert_eq!(above.join("c").to_string(), "/a/c");
    }
}
