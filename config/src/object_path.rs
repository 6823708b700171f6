//! [`ObjectPath`]: a path in a configuration, such as `/targets/demo/luns/0`.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// A path from the root of a configuration: a JSON Pointer (RFC 6901), where `~1` is a slash in a
/// name and `~0` a tilde. List items use their names if they have names (targets and users by name,
/// portals as `iscsi:192.0.2.10:3260`), or else their indices starting at 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectPath(Vec<String>);

impl ObjectPath {
    /// Returns the path segments, without escapes.
    #[must_use]
    pub fn segments(&self) -> &[String] {
        &self.0
    }

    /// Returns the path for a key or name below this path.
    #[must_use]
    pub fn join(&self, segment: &str) -> Self {
        let mut segments = self.0.clone();
        segments.push(segment.to_owned());
        Self(segments)
    }

    /// Returns the parent path and the last segment, or `None` for the root.
    #[must_use]
    pub fn split_last(&self) -> Option<(Self, &str)> {
        let (last, rest) = self.0.split_last()?;
        Some((Self(rest.to_vec()), last))
    }
}

/// Escapes a name for use in a path (RFC 6901 3).
pub(super) fn escaped(name: &str) -> Cow<'_, str> {
    match name.contains(['~', '/']) {
        // Tildes must be replaced first, because the other escape contains a tilde.
        true => name.replace('~', "~0").replace('/', "~1").into(),
        false => name.into(),
    }
}

/// Decodes an escaped segment. Returns `None` if a `~` is not a valid escape (RFC 6901 4).
fn unescaped(segment: &str) -> Option<String> {
    let mut parts = segment.split('~');
    let mut name = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (c, rest) = match part.split_at_checked(1)? {
            ("0", rest) => ('~', rest),
            ("1", rest) => ('/', rest),
            _ => return None,
        };
        name.push(c);
        name.push_str(rest);
    }
    Some(name)
}

impl FromStr for ObjectPath {
    type Err = String;

    /// Parses `/a/b`; the leading slash and a trailing slash are optional.
    fn from_str(text: &str) -> Result<Self, String> {
        let inner = text.strip_prefix('/').unwrap_or(text);
        let inner = inner.strip_suffix('/').unwrap_or(inner);
        if inner.is_empty() {
            return Ok(Self::default());
        }
        let names = inner.split('/').map(|segment| match unescaped(segment) {
            Some(name) if !name.is_empty() => Ok(name),
            Some(_) => Err(format!("invalid path `{text}`: it contains an empty name")),
            None => Err(format!(
                "invalid path `{text}`: in names, `~` must be written as `~0`, and `/` as `~1`"
            )),
        });
        names.collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for ObjectPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("/");
        }
        self.0
            .iter()
            .try_for_each(|segment| write!(f, "/{}", escaped(segment)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_round_trip() {
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
            assert_eq!(text.parse::<ObjectPath>().unwrap().to_string(), shown);
        }
        assert!("/targets//demo".parse::<ObjectPath>().is_err());
        let place: ObjectPath = "/a/b".parse().unwrap();
        let (above, name) = place.split_last().unwrap();
        assert_eq!((above.to_string().as_str(), name), ("/a", "b"));
        assert_eq!(above.join("c").to_string(), "/a/c");
    }

    #[test]
    fn slashes_and_tildes_in_names_are_escaped() {
        // The examples of RFC 6901 5 and 4.
        for (text, name) in [
            ("/a~1b", "a/b"),
            ("/m~0n", "m~n"),
            ("/~01", "~1"),
            ("/~1~0", "/~"),
            ("/é~1", "é/"),
        ] {
            let place: ObjectPath = text.parse().unwrap();
            assert_eq!(place.segments(), [name]);
            assert_eq!(place.to_string(), text);
        }
        for text in ["/a~", "/a~2b", "/~é"] {
            assert!(
                text.parse::<ObjectPath>().unwrap_err().contains("`~0`"),
                "{text}"
            );
        }
        let place = ObjectPath::default().join("users").join("me/2");
        assert_eq!(place.to_string(), "/users/me~12");
    }
}
