//! NBD export addresses, as defined in `doc/uri.md` by the NBD project.
//!
//! These are RFC 3986 URIs: the export name and query values are percent-encoded.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

use super::proto::{MAX_STRING, NBD_PORT};

/// Error for an invalid NBD address.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum UriError {
    /// Not an NBD scheme.
    #[error("an NBD address must start with `nbd://` or `nbd+unix://`")]
    Scheme,
    /// The scheme requires encryption.
    #[error("`{0}` requires TLS, which is not supported")]
    Tls(String),
    /// User name, only used for TLS.
    #[error("an NBD address without TLS must not contain a user")]
    User,
    /// Missing or malformed host.
    #[error("host `{0}` is not an address or a name")]
    Host(String),
    /// The port isn't a number from 1 to 65535.
    #[error("port `{0}` is not a number from 1 to 65535")]
    Port(String),
    /// Host used with a Unix socket.
    #[error("`nbd+unix://{0}` contains a host; use `nbd+unix:///EXPORT?socket=PATH`")]
    HostOfSocket(String),
    /// Unix socket without a path.
    #[error("`nbd+unix` requires the path of a socket: `?socket=PATH`")]
    NoSocket,
    /// Invalid socket path.
    #[error("socket `{0}` is not a path")]
    Socket(String),
    /// Percent sign without two hex digits, or invalid UTF-8.
    #[error("`{0}` is not a percent-encoded UTF-8 string")]
    Encoding(String),
    /// The export name contains a NUL byte or exceeds the max length.
    #[error("the name of an export must not exceed {MAX_STRING} bytes or contain NUL")]
    Export,
    /// Query key which is unknown, or not supported for this scheme.
    #[error("unknown key `{0}`")]
    UnknownKey(String),
    /// Duplicate key.
    #[error("key `{0}` occurs twice")]
    Repeated(String),
}

/// NBD server location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdServer {
    /// TCP server.
    Tcp {
        /// Host name or address; IPv6 addresses don't include brackets.
        host: String,
        /// TCP port.
        port: u16,
    },
    /// Unix socket path.
    Unix(PathBuf),
}

/// Export address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    /// Server location.
    pub server: NbdServer,
    /// Export name; empty for the default export.
    pub export: String,
}

impl NbdUri {
    /// Returns whether the text uses an NBD scheme, even if it isn't supported.
    #[must_use]
    pub fn has_scheme(text: &str) -> bool {
        let scheme = text.split_once("://").map(|(scheme, _)| scheme);
        scheme.is_some_and(|s| s == "nbd" || s == "nbds" || s.starts_with("nbd+") || is_tls(s))
    }
}

fn is_tls(scheme: &str) -> bool {
    scheme == "nbds" || scheme.starts_with("nbds+")
}

impl FromStr for NbdUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let (scheme, rest) = text.split_once("://").ok_or(UriError::Scheme)?;
        if is_tls(scheme) {
            return Err(UriError::Tls(scheme.to_owned()));
        }
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decode(path)?;
        if export.len() > MAX_STRING || export.contains('\0') {
            return Err(UriError::Export);
        }
        let mut socket = None;
        for pair in query.into_iter().flat_map(|query| query.split('&')) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            // We must reject unknown keys: for example, a key which requires TLS can't be ignored.
            match key {
                "socket" if scheme == "nbd+unix" => {
                    if socket.replace(decode(value)?).is_some() {
                        return Err(UriError::Repeated(key.to_owned()));
                    }
                }
                _ => return Err(UriError::UnknownKey(key.to_owned())),
            }
        }
        let server = match scheme {
            "nbd" => parse_authority(authority)?,
            "nbd+unix" if !authority.is_empty() => {
                return Err(UriError::HostOfSocket(authority.to_owned()));
            }
            "nbd+unix" => match socket {
                None => return Err(UriError::NoSocket),
                // Abstract sockets start with NUL and don't have a path.
                Some(path) if path.is_empty() || path.contains('\0') => {
                    return Err(UriError::Socket(path.replace('\0', "%00")));
                }
                Some(path) => NbdServer::Unix(path.into()),
            },
            _ => return Err(UriError::Scheme),
        };
        Ok(Self { server, export })
    }
}

fn parse_authority(text: &str) -> Result<NbdServer, UriError> {
    if text.contains('@') {
        return Err(UriError::User);
    }
    let bad = || UriError::Host(text.to_owned());
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or_else(bad)?;
            host.parse::<std::net::Ipv6Addr>().map_err(|_| bad())?;
            (host, port)
        }
        None => {
            let at = text.find(':').unwrap_or(text.len());
            let (host, port) = text.split_at(at);
            let is_name = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
            if host.is_empty() || !host.bytes().all(is_name) {
                return Err(bad());
            }
            (host, port)
        }
    };
    let port = match port.strip_prefix(':') {
        // RFC 3986 allows a colon without a port number.
        Some("") => NBD_PORT,
        Some(port) => {
            let is_number = port.bytes().all(|b| b.is_ascii_digit());
            let number = port.parse().ok().filter(|port| is_number && *port != 0);
            number.ok_or_else(|| UriError::Port(port.to_owned()))?
        }
        None if port.is_empty() => NBD_PORT,
        None => return Err(bad()),
    };
    Ok(NbdServer::Tcp {
        host: host.to_owned(),
        port,
    })
}

fn decode(text: &str) -> Result<String, UriError> {
    let bad = || UriError::Encoding(text.to_owned());
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, after) = rest.split_first_chunk::<2>().ok_or_else(bad)?;
        let digit = |b: u8| char::from(b).to_digit(16).ok_or_else(bad);
        bytes.push((digit(digits[0])? * 16 + digit(digits[1])?) as u8);
        rest = after;
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

/// Writes a percent-encoded string; all bytes with a special meaning in URIs are encoded.
fn encode(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    for byte in text.bytes() {
        let is_plain = byte.is_ascii_alphanumeric() || b"-._~/:,@+".contains(&byte);
        match is_plain {
            true => write!(f, "{}", char::from(byte))?,
            false => write!(f, "%{byte:02X}")?,
        }
    }
    Ok(())
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.server {
            NbdServer::Tcp { host, port } => {
                match host.contains(':') {
                    true => write!(f, "nbd://[{host}]")?,
                    false => write!(f, "nbd://{host}")?,
                }
                if *port != NBD_PORT {
                    write!(f, ":{port}")?;
                }
                f.write_str("/")?;
                encode(f, &self.export)
            }
            NbdServer::Unix(path) => {
                f.write_str("nbd+unix:///")?;
                encode(f, &self.export)?;
                f.write_str("?socket=")?;
                encode(f, &path.to_string_lossy())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16, export: &str) -> NbdUri {
        NbdUri {
            server: NbdServer::Tcp {
                host: host.to_owned(),
                port,
            },
            export: export.to_owned(),
        }
    }

    fn unix(path: &str, export: &str) -> NbdUri {
        NbdUri {
            server: NbdServer::Unix(path.into()),
            export: export.to_owned(),
        }
    }

    /// See the table in `doc/uri.md`; test both address types in all forms.
    #[test]
    fn uri_contains_server_and_export() {
        for (text, want) in [
            ("nbd://example.com/disk", tcp("example.com", 10809, "disk")),
            ("nbd+unix:///disk?socket=sock", unix("sock", "disk")),
            ("nbd://example.com/", tcp("example.com", 10809, "")),
            ("nbd://example.com", tcp("example.com", 10809, "")),
            (
                "nbd://example.com//disk",
                tcp("example.com", 10809, "/disk"),
            ),
            ("nbd://h:1/hello%20world", tcp("h", 1, "hello world")),
            ("nbd://[::1]:99/a%3Fb", tcp("::1", 99, "a?b")),
            ("nbd+unix:///?socket=/a%26b%20c", unix("/a&b c", "")),
        ] {
            let uri: NbdUri = text.parse().unwrap();
            assert_eq!(uri, want, "{text}");
            assert_eq!(uri.to_string().parse(), Ok(want), "{uri}");
        }
    }

    #[test]
    fn uri_errors_name_invalid_part() {
        for (text, words) in [
            ("nbds://h/x", "TLS"),
            ("nbds+unix:///x?socket=s", "TLS"),
            ("nbd://user@h/x", "contain a user"),
            ("nbd:///x", "host"),
            ("nbd://[::1/x", "host"),
            ("nbd://[1.2.3.4]/x", "host"),
            ("nbd://h:0/x", "port `0`"),
            ("nbd://h:+1/x", "port `+1`"),
            ("nbd://h:70000/x", "port `70000`"),
            ("nbd://h/%zz", "`%zz`"),
            ("nbd://h/%ff", "`%ff`"),
            ("nbd://h/a%00", "contain NUL"),
            ("nbd://h/x?tls-type=psk", "`tls-type`"),
            ("nbd://h/x?socket=s", "`socket`"),
            ("nbd+unix:///x", "?socket=PATH"),
            ("nbd+unix://h/x?socket=s", "contains a host"),
            ("nbd+unix:///x?socket=", "not a path"),
            ("nbd+unix:///x?socket=%00a", "`%00a` is not a path"),
            ("nbd+unix:///x?socket=a&socket=b", "twice"),
            ("nbd+vsock://2/x", "must start with"),
        ] {
            assert!(NbdUri::has_scheme(text), "{text}");
            let error = text.parse::<NbdUri>().unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
        assert!(!NbdUri::has_scheme("srp://h/0") && !NbdUri::has_scheme("nbd"));
    }
}
