//! The configuration of `riserd run --serve`, which serves disks without a configuration file.

use std::net::IpAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::str::FromStr;

use serde_json::{Map, Value, json};

/// Name of the configuration in messages.
pub(super) const ORIGIN: &str = "--serve";

/// iSCSI name of the target.
const IQN: &str = "iqn.2026-01.com.example:riser";

/// A disk: a file or a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Disk {
    path: PathBuf,
    /// Size of the file, such as `1GiB`. The configuration parser checks it.
    size: Option<String>,
    /// Create the file, or extend it to `size`.
    create: bool,
    read_only: bool,
}

/// Parses `PATH[,size=SIZE][,create][,read_only]`.
impl FromStr for Disk {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut words = text.split(',');
        let path = words.next().unwrap_or_default();
        if path.is_empty() {
            return Err("missing path of the disk".to_owned());
        }
        let mut disk = Self {
            path: path.into(),
            size: None,
            create: false,
            read_only: false,
        };
        for word in words {
            match word.split_once('=') {
                Some(("size", size)) => disk.size = Some(size.to_owned()),
                None if word == "create" => disk.create = true,
                None if word == "read_only" => disk.read_only = true,
                _ => {
                    return Err(format!(
                        "unknown option `{word}`: the options are size=SIZE, create and read_only"
                    ));
                }
            }
        }
        if disk.create && disk.size.is_none() {
            return Err("create requires size=SIZE".to_owned());
        }
        Ok(disk)
    }
}

impl Disk {
    /// Returns the configuration of the backend.
    fn backend(&self) -> Value {
        // The state directory keeps the path, and the next start may use another working directory.
        let path = std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone());
        let is_device = path
            .metadata()
            .is_ok_and(|m| m.file_type().is_block_device());
        let mut backend = json!({
            "kind": if is_device { "device" } else { "file" },
            "path": path,
            "read_only": self.read_only,
        });
        if let Some(size) = &self.size {
            backend["size"] = json!(size);
        }
        if self.create {
            backend["create"] = json!(true);
        }
        backend
    }
}

/// Returns a configuration with a single target, which serves the disks over iSCSI, iSER and SRP to
/// all initiators that can reach an address in `listen`. JSON is also YAML.
pub(super) fn document(disks: &[Disk], listen: &[IpAddr]) -> String {
    let (mut backends, mut luns) = (Map::new(), Map::new());
    for (lun, disk) in disks.iter().enumerate() {
        let name = format!("disk{lun}");
        backends.insert(name.clone(), disk.backend());
        luns.insert(lun.to_string(), json!(name));
    }
    let portals = listen.iter().flat_map(|address| {
        let portal = |protocol| json!({ "protocol": protocol, "listen": address });
        ["iscsi", "iser", "srp"].map(portal)
    });
    let target = json!({
        "name": "riser",
        "iqn": IQN,
        "portals": portals.collect::<Vec<_>>(),
        "luns": luns,
        "access": "open",
    });
    json!({ "backends": backends, "targets": [target] }).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn disk_options_are_parsed() {
        let disk: Disk = "a/b.img,size=1GiB,create".parse().unwrap();
        assert_eq!(disk.path, PathBuf::from("a/b.img"));
        assert_eq!(disk.size.as_deref(), Some("1GiB"));
        assert!(disk.create && !disk.read_only);
        let error = |text: &str| text.parse::<Disk>().unwrap_err();
        assert!(error("").starts_with("missing path"));
        assert!(error("a,create").contains("requires size"));
        assert!(error("a,sise=1").contains("`sise=1`"));
    }

    #[test]
    fn document_is_valid_configuration() {
        let disks = ["a.img,size=1GiB,create", "b.img,read_only"].map(|d| d.parse().unwrap());
        let text = document(&disks, &["127.0.0.1".parse().unwrap()]);
        let config = Config::parse(&text, ORIGIN).unwrap();
        assert_eq!(config.targets.len(), 1);
        assert_eq!(config.backends.len(), 2);
        let invalid = ["a.img,size=x,create"].map(|d| d.parse().unwrap());
        let text = document(&invalid, &["127.0.0.1".parse().unwrap()]);
        let mistake = Config::parse(&text, ORIGIN).unwrap_err().to_string();
        assert!(mistake.contains("backends.disk0.size"), "{mistake}");
    }
}
