//! Addresses of disks.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use riser_exports::nbd::NbdUri;
use riser_initiator::url::{TargetUrl, UrlError};

use super::exit::{CliError, Exit};
use super::units;

/// Address of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A disk in the memory of this process.
    Memory {
        /// Size of the disk in bytes.
        capacity: u64,
        /// Size of a block in bytes.
        block_size: u32,
    },
    /// A regular file or block device on this host.
    File {
        /// Absolute path.
        path: PathBuf,
        /// Set to bypass the page cache.
        direct: bool,
    },
    /// An export of an NBD server.
    Nbd(NbdUri),
    /// A logical unit of a target.
    Target(Box<TargetUrl>),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(memory) = text.strip_prefix("mem:") {
            return memory_disk(memory);
        }
        if let Some(file) = text.strip_prefix("file:") {
            return file_disk(file);
        }
        // As in a shell, a name without a slash is not a path. Otherwise a misspelled address would
        // be used as a file name.
        if ["/", "./", "../"]
            .iter()
            .any(|begin| text.starts_with(begin))
        {
            return file_at(text, false);
        }
        if NbdUri::has_scheme(text) {
            let uri: Result<NbdUri, _> = text.parse();
            return uri.map(Self::Nbd).map_err(|e| e.to_string());
        }
        let url = add_target_url(text);
        match url.as_deref().unwrap_or(text).parse() {
            Ok(url) => Ok(Self::Target(Box::new(url))),
            Err(UrlError::Scheme) => Err(UNKNOWN.to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Error if the address has an unknown format.
const UNKNOWN: &str = "address must start with `srp://`, `iscsi://`, `iser://`, `nbd://`, \
     `nbd+unix://`, `file:` or `mem:`, or be a path that starts with `/`, `./` or `../`";

/// Parses `SIZE[,BLOCK]`.
fn memory_disk(text: &str) -> Result<Address, String> {
    let (capacity, block_size) = text.split_once(',').unwrap_or((text, "512"));
    let capacity = units::size(capacity)?;
    let block_size = units::size(block_size)?;
    if !matches!(block_size, 512 | 4096) {
        return Err(format!(
            "invalid block size {block_size}: expected 512 or 4096"
        ));
    }
    if capacity == 0 || !capacity.is_multiple_of(block_size) {
        return Err(format!(
            "{capacity} bytes are not a multiple of the block size"
        ));
    }
    Ok(Address::Memory {
        capacity,
        block_size: block_size as u32,
    })
}

/// Parses `PATH[?direct=on|off]`. The path may follow an empty host, as in `file:///PATH`.
fn file_disk(text: &str) -> Result<Address, String> {
    // Options start after the last question mark. Any other question marks are part of the path.
    let (path, query) = match text.rsplit_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (text, None),
    };
    let path = match path.strip_prefix("//") {
        Some(path) if path.starts_with('/') => path,
        Some(path) => {
            return Err(format!(
                "`file://{path}` contains a host; use `file:PATH` or `file:///PATH`"
            ));
        }
        None => path,
    };
    let mut direct = None;
    for pair in query.into_iter().flat_map(|query| query.split('&')) {
        let value = match pair.split_once('=') {
            Some(("direct", "on" | "1")) => true,
            Some(("direct", "off" | "0")) => false,
            Some(("direct", value)) => {
                return Err(format!(
                    "value `{value}` of key `direct` is not `on` or `off`"
                ));
            }
            _ => return Err(format!("`{pair}` is not `direct=on` or `direct=off`")),
        };
        if direct.replace(value).is_some() {
            return Err("key `direct` occurs twice".into());
        }
    }
    file_at(path, direct.unwrap_or(false))
}

/// Returns the address for a path, which doesn't depend on the working directory.
fn file_at(path: &str, direct: bool) -> Result<Address, String> {
    match std::path::absolute(path) {
        Ok(path) => Ok(Address::File { path, direct }),
        Err(_) if path.is_empty() => Err("missing path of the file".into()),
        Err(error) => Err(format!("path `{path}`: {error}")),
    }
}

/// Converts a line written to `add_target` in the Linux kernel to a URL. The line contains
/// comma-separated keys and values, including `dest`.
fn add_target_url(text: &str) -> Option<String> {
    let (dest, keys): (Vec<&str>, Vec<&str>) = text
        .split(',')
        .map(str::trim)
        .partition(|part| part.starts_with("dest="));
    let [dest] = dest.as_slice() else {
        return None;
    };
    Some(format!(
        "srp://{}/?{}",
        &dest["dest=".len()..],
        keys.join("&")
    ))
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory {
                capacity,
                block_size,
            } => write!(f, "mem:{capacity},{block_size}"),
            Self::File { path, direct } => {
                let option = if *direct { "?direct=on" } else { "" };
                // Without the scheme, a question mark in a path doesn't start options.
                let scheme = match path.to_string_lossy().contains('?') {
                    true if !*direct => "",
                    _ => "file:",
                };
                write!(f, "{scheme}{}{option}", path.display())
            }
            Self::Nbd(uri) => uri.fmt(f),
            Self::Target(url) => url.fmt(f),
        }
    }
}

impl Address {
    /// Returns the logical unit number, or 0 if the address doesn't contain one.
    #[must_use]
    pub fn lun(&self) -> u32 {
        match self {
            Self::Target(url) => url.lun().unwrap_or(0).into(),
            Self::Memory { .. } | Self::File { .. } | Self::Nbd(_) => 0,
        }
    }

    /// Returns the name used for exports of the disk, which depends on the unit, file or export in
    /// its address.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Target(_) | Self::Memory { .. } => format!("lun{}", self.lun()),
            Self::File { path, .. } => {
                let name = path.file_name().unwrap_or_default();
                name.to_string_lossy().into_owned()
            }
            Self::Nbd(uri) => {
                let plain = |c: char| {
                    if c.is_ascii_alphanumeric() || "-_.".contains(c) {
                        c
                    } else {
                        '_'
                    }
                };
                let name: String = uri.export.chars().map(plain).collect();
                // The name can't be empty, and these two are directories.
                match name.as_str() {
                    "" | "." | ".." => "disk".into(),
                    _ => name,
                }
            }
        }
    }

    /// Returns the address of a target, for verbs that only support targets.
    ///
    /// # Errors
    /// Fails if this is not the address of a target.
    pub fn target(&self) -> Result<&TargetUrl, CliError> {
        let what = match self {
            Self::Target(url) => return Ok(url),
            Self::Memory { .. } => "a disk in memory",
            Self::File { .. } => "a file or block device of this host",
            Self::Nbd(_) => "an NBD export",
        };
        let error = format!("{self} is {what}, not the address of a target");
        Err(CliError::new(Exit::Usage, error).help(
            "this verb requires a SCSI target, for example srp://HOST/LUN or \
             iscsi://HOST/TARGET/LUN",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_exports_are_addresses_of_disks() {
        let file = |path: &str, direct| Address::File {
            path: path.into(),
            direct,
        };
        for (text, want, shown) in [
            ("/dev/sda", file("/dev/sda", false), "file:/dev/sda"),
            ("file:/a", file("/a", false), "file:/a"),
            (
                "file:///a b?direct=on",
                file("/a b", true),
                "file:/a b?direct=on",
            ),
            ("file:/a?direct=0", file("/a", false), "file:/a"),
            ("/what?", file("/what?", false), "/what?"),
            (
                "file:/what?/a?direct=on",
                file("/what?/a", true),
                "file:/what?/a?direct=on",
            ),
            (
                "file:/what?/a?direct=off",
                file("/what?/a", false),
                "/what?/a",
            ),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address, want, "{text}");
            assert_eq!(address.to_string(), shown);
            assert_eq!(shown.parse(), Ok(want));
        }
        let here = std::env::current_dir().unwrap();
        let relative: Address = "file:disk.img".parse().unwrap();
        assert_eq!(
            relative,
            Address::File {
                path: here.join("disk.img"),
                direct: false
            }
        );
        let nbd: Address = "nbd+unix:///my%20disk?socket=/run/nbd".parse().unwrap();
        assert_eq!(nbd.to_string(), "nbd+unix:///my%20disk?socket=/run/nbd");
        assert_eq!((nbd.name(), nbd.lun()), ("my_disk".to_owned(), 0));
        assert_eq!("nbd://h".parse::<Address>().unwrap().name(), "disk");
        assert_eq!(relative.name(), "disk.img");
    }

    #[test]
    fn invalid_addresses_fail_with_reason() {
        for (text, words) in [
            ("disk.img", "starts with `/`, `./` or `../`"),
            ("nvme://x", "must start with `srp://`"),
            ("file:", "missing"),
            ("file://host/a", "contains a host"),
            ("file:/a?cache=off", "`cache=off`"),
            ("file:/a?direct=maybe", "`maybe`"),
            ("file:/a?direct=on&direct=on", "twice"),
            ("nbds://h/x", "TLS"),
            ("nbd+unix:///x", "?socket=PATH"),
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
        for text in ["nbd://h/x", "file:/a", "mem:1M"] {
            let address: Address = text.parse().unwrap();
            let error = address.target().unwrap_err();
            assert!(
                error.what.contains("not the address of a target"),
                "{error}"
            );
            assert_eq!(error.exit, Exit::Usage);
        }
    }
}
