//! Persistent names of logical units: if a serial number or world-wide name is not configured, it
//! is derived when the backend is first used, and stored.
//!
//! Initiators will find the same unit even if an image is moved, its host is renamed, or its disk
//! is moved to another host. Backends are identified by name. If the name has changed, we use the
//! file ID, unless another backend has the same file. If the file ID has changed, the names are
//! kept, but we log a warning: the file may be a copy, and the original must not be served with the
//! same names.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};

use riser_scsi::config::Identity;
use riser_scsi::data::designator::Naa;
use serde::{Deserialize, Serialize};

use crate::backend::FileId;
use crate::config::{Backend, Config, HostId, Source};

/// Stores names so that they survive a restart.
pub trait IdentityKeeper: Debug + Send + Sync {
    /// Loads the stored names. Returns the default value on the first start.
    ///
    /// # Errors
    /// If they cannot be read.
    fn load(&self) -> io::Result<Identities>;

    /// Stores names persistently, replacing the old names.
    ///
    /// # Errors
    /// If they cannot be written. Either the old or the new names are stored in this case.
    fn save(&self, identities: &Identities) -> io::Result<()>;
}

/// Persistent names of units, which are not affected by restarts or moves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identities {
    /// Text used to derive names on this host, unless it is configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    host: Option<String>,
    /// Random number for the first start, which becomes part of `host`.
    #[serde(skip)]
    random: Option<u64>,
    /// Names by backend name.
    backends: BTreeMap<String, Names>,
}

/// The kind of file found for a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Not open.
    Nothing,
    /// A file.
    File(FileId),
    /// A device, or memory.
    Other,
}

/// The names of a backend's unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Names {
    serial: String,
    /// 60 bits that are assigned locally (SPC-4 7.8.6.6.4). `None` if the configuration has always
    /// used a different format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    naa: Option<u64>,
    /// ID of the last file. `None` for a device or memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    file: Option<FileId>,
    /// Last absolute path of the file or device. A relative path would be a different file in
    /// another working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<PathBuf>,
    /// Number of times that it was missing and returned, or that the file has changed.
    #[serde(default)]
    returns: u64,
    /// Set if it was missing on the last check, possibly by another process.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_missing: bool,
}

/// Returns the text used to derive names in a new installation.
fn first_host(machine: &HostId, random: Option<u64>) -> String {
    match random {
        Some(random) => format!("{}-{random:016x}", machine.text()),
        None => machine.text().to_owned(),
    }
}

impl Identities {
    /// Creates the state for a new installation. Containers and golden images do not have a machine
    /// ID and often share a host name, so their names also depend on a random number.
    pub(super) fn of_new_host(random: u64) -> Self {
        Self {
            random: Some(random),
            ..Self::default()
        }
    }

    /// Returns the text used to derive names, either from the configuration or from the first
    /// start.
    pub fn host(&mut self, config: &Config) -> HostId {
        match &config.identity {
            Some(_) => HostId::of(config),
            None => {
                // Keep this from the first start: if the host is renamed, its disks must keep their
                // names.
                let random = self.random;
                let host = self.host.get_or_insert_with(|| {
                    let random = random.filter(|_| !HostId::has_machine_id());
                    first_host(&HostId::of(config), random)
                });
                HostId::new(host)
            }
        }
    }

    /// Returns the names that the unit of a backend will use.
    pub fn identity(&mut self, config: &Config, backend: &Backend) -> Identity {
        let mut identity = backend.identity(&self.host(config));
        self.keep(config, backend, Found::Nothing, &mut identity);
        identity
    }

    /// Returns true if both contain the same losses.
    pub(super) fn has_losses_of(&self, other: &Self) -> bool {
        self.agrees_with(other, |names| (names.returns, names.is_missing))
    }

    /// Marks backends as missing if they are missing in `others`.
    pub(super) fn add_missing(&mut self, others: &Self) {
        for (name, names) in &mut self.backends {
            names.is_missing |= others.is_missing(name);
        }
    }

    /// Adds losses from `others`, which started without any.
    pub(super) fn add_losses(&mut self, others: &Self) {
        for (name, names) in &mut self.backends {
            names.returns += others.backends.get(name).map_or(0, |other| other.returns);
        }
        self.add_missing(others);
    }

    /// Returns true if both contain the same names as seen by initiators.
    pub(super) fn has_names_of(&self, other: &Self) -> bool {
        self.host == other.host
            && self.agrees_with(other, |names| (names.serial.as_str(), names.naa))
    }

    /// Returns true if both have the same backends with equal values of `part`.
    fn agrees_with<'a, T: PartialEq>(
        &'a self,
        other: &'a Self,
        part: impl Fn(&'a Names) -> T,
    ) -> bool {
        let parts = |all: &'a Self| {
            let backends = all.backends.iter();
            backends.map(|(name, names)| (name, part(names)))
        };
        parts(self).eq(parts(other))
    }

    /// Records whether a backend is missing. If it was missing before and no longer is, this counts
    /// as a return.
    pub(super) fn set_missing(&mut self, backend: &str, is_missing: bool) {
        if let Some(names) = self.backends.get_mut(backend) {
            let was_missing = std::mem::replace(&mut names.is_missing, is_missing);
            names.returns += u64::from(was_missing && !is_missing);
        }
    }

    /// Returns true if a backend was missing on the last check.
    pub(super) fn is_missing(&self, backend: &str) -> bool {
        let names = self.backends.get(backend);
        names.is_some_and(|names| names.is_missing)
    }

    /// Returns the generation of a backend's volatile cache, based on the generation for all files
    /// of the host. If the disk was missing or the file has changed, data that was not flushed may
    /// be lost.
    pub(super) fn cache_generation(&self, backend: &str, of_host: [u8; 16]) -> [u8; 16] {
        let returns = self.backends.get(backend).map_or(0, |names| names.returns);
        (u128::from_be_bytes(of_host) ^ u128::from(returns)).to_be_bytes()
    }

    /// Returns true if this is the last path of a backend.
    pub(super) fn is_at(&self, backend: &str, path: &Path) -> bool {
        let names = self.backends.get(backend);
        names.is_some_and(|names| names.place() == Some(absolute(path)))
    }

    /// Returns true if there was a file at the current path of a backend before.
    pub fn knows(&self, backend: &Backend) -> bool {
        let known = self.backends.get(&backend.name);
        known.is_some_and(|names| names.file.is_some() && names.place() == path_of(backend))
    }

    /// Sets the names of a unit to its stored names unless they are configured, and stores the
    /// resulting names.
    pub(super) fn keep(
        &mut self,
        config: &Config,
        backend: &Backend,
        found: Found,
        identity: &mut Identity,
    ) {
        let before = self.adopt_names(config, backend, found);
        let is_other = before.as_ref().is_some_and(|b| b.is_other(backend, found));
        // If the configuration assigns a name to another backend, don't use it here. Initiators
        // would treat the two disks as two paths to the same disk.
        let is_given = |is_it: &dyn Fn(&Backend) -> bool| {
            let mut others = config.backends.iter().filter(|b| b.name != backend.name);
            let is_given = others.any(is_it);
            if is_given {
                let name = &backend.name;
                tracing::warn!(
                    backend = name,
                    "a previous serial number or NAA name of this backend is now configured for a \
                     different backend, so this backend gets a new one"
                );
            }
            is_given
        };
        let derives_serial = backend.names.serial.is_none();
        let serial = before.as_ref().map(|before| before.serial.clone());
        let serial = serial.filter(|serial| {
            derives_serial && !is_given(&|other| other.names.serial.as_ref() == Some(serial))
        });
        let derives_naa = backend.names.naa.is_none();
        let naa = before.as_ref().and_then(|before| before.naa);
        let naa = naa
            .map(Naa::LocallyAssigned)
            .filter(|naa| derives_naa && !is_given(&|other| other.names.naa.as_ref() == Some(naa)));
        // Only new names must not be in use. Names that are known to initiators are kept.
        if (derives_serial && serial.is_none()) || (derives_naa && naa.is_none()) {
            self.derive_unused(config, backend, identity);
        }
        if let Some(serial) = serial {
            identity.serial = serial;
        }
        if let Some(naa) = naa {
            identity.naa = naa;
        }
        if is_other {
            let (name, serial) = (&backend.name, &identity.serial);
            tracing::warn!(
                backend = name,
                serial,
                "the file or device has changed: it was moved to another file system, restored, or \
                 it is a copy; the original must not be served with the same serial number"
            );
        }
        let naa = match (identity.naa, &before) {
            (Naa::LocallyAssigned(naa), _) => Some(naa),
            // A different format is configured. If this is removed, the previous name is used
            // again.
            (_, Some(before)) => before.naa,
            (_, None) => None,
        };
        let path = path_of(backend);
        let known = before.as_ref();
        let returns = known.map_or(0, |before| before.returns) + u64::from(is_other);
        let is_missing = known.is_some_and(|before| before.is_missing);
        let (file, path) = match (found, before) {
            (Found::Nothing, Some(before)) => (before.file, before.path),
            (Found::File(file), _) => (Some(file), path),
            (Found::Other, _) => (None, path),
            // It was never found.
            (Found::Nothing, None) => (None, None),
        };
        let serial = identity.serial.clone();
        let names = Names {
            serial,
            naa,
            file,
            path,
            returns,
            is_missing,
        };
        self.backends.insert(backend.name.clone(), names);
    }

    /// Derives different names while these are used by another backend. For example, a renamed
    /// backend keeps the names derived from its old name.
    fn derive_unused(&mut self, config: &Config, backend: &Backend, identity: &mut Identity) {
        let host = self.host(config);
        let is_used = |identity: &Identity| {
            let is_serial = |serial: &str| serial == identity.serial;
            let is_naa = |naa: Naa| naa == identity.naa;
            let given = config.backends.iter().map(|b| (&b.name, &b.names));
            let given = given.map(|(name, names)| {
                let serial = names.serial.as_deref().is_some_and(is_serial);
                (name, serial, names.naa.is_some_and(is_naa))
            });
            let kept = self.backends.iter().map(|(name, names)| {
                let naa = names.naa.map(Naa::LocallyAssigned);
                (name, is_serial(&names.serial), naa.is_some_and(is_naa))
            });
            let mut others = given
                .chain(kept)
                .filter(|(name, ..)| **name != backend.name);
            // Configured names are not derived, so they can't be changed.
            others.any(|(_, serial, naa)| {
                (serial && backend.names.serial.is_none()) || (naa && backend.names.naa.is_none())
            })
        };
        for attempt in 1_u32.. {
            if !is_used(identity) {
                return;
            }
            let other = HostId::new(&format!("{}\0{attempt}", host.text()));
            *identity = backend.identity(&other);
        }
    }

    /// Returns the entry for a backend, or the entry for its file if the name of that backend no
    /// longer exists.
    fn adopt_names(&mut self, config: &Config, backend: &Backend, found: Found) -> Option<Names> {
        if let Some(names) = self.backends.get(&backend.name) {
            return Some(names.clone());
        }
        let is_same = |names: &Names| match (&names.file, found) {
            (Some(one), Found::File(other)) => one.is_same(&other),
            _ => false,
        };
        let is_configured = |name: &str| config.backends.iter().any(|b| b.name == name);
        let mut others = self.backends.iter();
        let (name, _) = others.find(|(name, names)| is_same(names) && !is_configured(name))?;
        let name = name.clone();
        tracing::info!(
            backend = backend.name,
            before = name,
            "a backend was renamed"
        );
        // Move the entry instead of copying it: if the old name is used again with a different
        // file, it is a different disk.
        self.backends.remove(&name)
    }
}

impl Names {
    /// Returns true if the file is different, or if it was replaced by a device or vice versa. For
    /// devices, we can only compare the path.
    fn is_other(&self, backend: &Backend, found: Found) -> bool {
        let is_device = matches!(backend.spec.source, Source::Device { .. });
        match (self.file, found) {
            (_, Found::Nothing) => false,
            (Some(was), Found::File(is)) => !was.is_same(&is),
            (Some(_), Found::Other) if is_device => true,
            // It was memory, or was never found.
            (None, _) if self.path.is_none() => false,
            (None, Found::File(_)) => true,
            _ => self.place() != path_of(backend),
        }
    }

    /// Returns the last absolute path of the file or device. Older versions have stored relative
    /// paths, which are still valid.
    fn place(&self) -> Option<PathBuf> {
        self.path.as_deref().map(absolute)
    }
}

/// Returns the absolute path of a backend's file or device.
fn path_of(backend: &Backend) -> Option<PathBuf> {
    backend.spec.source.path().map(absolute)
}

/// Returns the absolute path, or `path` if the working directory is unknown.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(backends: &[(&str, &str)]) -> Config {
        let backends = backends.iter().map(|(name, rest)| {
            format!("  {name}: {{ kind: file, path: /images/{name}, size: 1MiB{rest} }}\n")
        });
        let text = format!("backends:\n{}targets: []\n", backends.collect::<String>());
        Config::parse(&text, "test.yaml").unwrap()
    }

    fn file(inode: u64) -> Found {
        Found::File(FileId {
            device: 1,
            inode,
            born: Some(inode),
        })
    }

    /// Returns the names of the first backend.
    fn keep(all: &mut Identities, config: &Config, found: Found) -> Identity {
        let backend = &config.backends[0];
        let mut identity = backend.identity(&all.host(config));
        all.keep(config, backend, found, &mut identity);
        identity
    }

    #[test]
    fn names_survive_move_and_rename() {
        let mut all = Identities::default();
        let first = keep(&mut all, &config(&[("d", "")]), file(1));
        let mut moved = config(&[("d", "")]);
        moved.backends[0].spec.source = crate::backend::Source::Device {
            path: "/dev/x".into(),
        };
        let before = all.cache_generation("d", [7; 16]);
        assert_eq!(
            keep(&mut all, &moved, Found::Nothing),
            first,
            "another path"
        );
        assert_eq!(all.cache_generation("d", [7; 16]), before);
        assert_eq!(keep(&mut all, &moved, Found::Other), first, "a device");
        let on_device = all.cache_generation("d", [7; 16]);
        assert_ne!(
            on_device, before,
            "what was written to the file is not on it"
        );
        keep(&mut all, &config(&[("d", "")]), file(1));
        assert_ne!(
            all.cache_generation("d", [7; 16]),
            on_device,
            "nor the other way"
        );
        assert_eq!(
            keep(&mut all, &config(&[("d", "")]), file(2)),
            first,
            "a copy"
        );
        let renamed = config(&[("e", "")]);
        assert_eq!(keep(&mut all, &renamed, file(2)), first, "another name");
        // The old name can be used for a new unit.
        assert_ne!(
            keep(&mut all, &config(&[("d", ""), ("e", "")]), file(3)),
            first
        );
    }

    #[test]
    fn relative_path_depends_on_working_directory() {
        let mut relative = config(&[("d", "")]);
        let Source::File { path, .. } = &mut relative.backends[0].spec.source else {
            unreachable!("it is a file");
        };
        *path = "./disk.img".into();
        let backend = &relative.backends[0];
        let mut all = Identities::default();
        keep(&mut all, &relative, file(1));
        assert!(all.knows(backend));
        assert!(all.is_at("d", Path::new("disk.img")));
        // Path stored by a daemon started in a different directory.
        all.backends.get_mut("d").unwrap().path = Some("/elsewhere/disk.img".into());
        assert!(!all.knows(backend));
        assert!(!all.is_at("d", Path::new("./disk.img")));
        assert!(all.is_at("d", Path::new("/elsewhere/disk.img")));
        // Path stored by an older version.
        all.backends.get_mut("d").unwrap().path = Some("disk.img".into());
        assert!(all.knows(backend));
        assert!(all.is_at("d", Path::new("./disk.img")));
    }

    #[test]
    fn derived_names_configured_elsewhere_are_dropped() {
        let mut all = Identities::default();
        let first = keep(&mut all, &config(&[("d", "")]), file(1));
        let Naa::LocallyAssigned(naa) = first.naa else {
            unreachable!("it is derived");
        };
        let mine = format!(", serial: {:?}, naa: 3{naa:015x}", first.serial);
        let after = keep(&mut all, &config(&[("d", ""), ("e", &mine)]), file(1));
        assert_ne!(after.serial, first.serial);
        assert_ne!(after.naa, first.naa);
        // The same for a new backend.
        let mut all = Identities::default();
        let new = keep(&mut all, &config(&[("d", ""), ("e", &mine)]), file(1));
        assert_ne!(new.serial, first.serial);
        assert_ne!(new.naa, first.naa);
    }

    /// Clones of a host without a machine ID derive different names.
    #[test]
    fn random_part_distinguishes_new_hosts() {
        let host = HostId::new("localhost");
        assert_eq!(first_host(&host, None), "localhost");
        assert_ne!(first_host(&host, Some(1)), first_host(&host, Some(2)));
        let config = config(&[("d", "")]);
        let mut all = Identities::of_new_host(1);
        let first = all.host(&config);
        let kept = serde_json::to_string(&all).unwrap();
        let mut kept: Identities = serde_json::from_str(&kept).unwrap();
        assert_eq!(kept.host(&config), first);
    }

    #[test]
    fn device_replacing_file_is_new_disk() {
        let mut all = Identities::default();
        let mut generations = Vec::new();
        let as_file = config(&[("d", "")]);
        let mut as_device = as_file.clone();
        as_device.backends[0].spec.source = Source::Device {
            path: "/images/d".into(),
        };
        for (config, found) in [
            (&as_file, file(1)),
            (&as_device, Found::Other),
            (&as_file, file(1)),
        ] {
            keep(&mut all, config, found);
            keep(&mut all, config, found);
            generations.push(all.cache_generation("d", [7; 16]));
        }
        generations.dedup();
        assert_eq!(generations.len(), 3);
    }

    #[test]
    fn later_derived_name_is_unique() {
        let mut all = Identities::default();
        let first = keep(&mut all, &config(&[("d", "")]), file(1));
        assert_eq!(keep(&mut all, &config(&[("e", "")]), file(1)), first);
        let naa = ", naa: 6001405abcdef0123456789abcdef012";
        let given = keep(&mut all, &config(&[("d", naa), ("e", "")]), file(2));
        let own = keep(&mut all, &config(&[("d", ""), ("e", "")]), file(2));
        assert_ne!(own.naa, first.naa, "two disks have one name");
        assert_eq!(own.serial, given.serial);
        // This name is kept.
        assert_eq!(keep(&mut all, &config(&[("d", "")]), file(2)), own);
    }

    #[test]
    fn file_of_other_backend_is_not_matched() {
        let mut all = Identities::default();
        let both = config(&[("d", ""), ("e", "")]);
        let first = keep(&mut all, &both, file(1));
        let backend = &both.backends[1];
        let mut second = backend.identity(&all.host(&both));
        all.keep(&both, backend, file(1), &mut second);
        assert_ne!(second.serial, first.serial);
    }

    #[test]
    fn configured_identity_takes_precedence() {
        let mut all = Identities::default();
        let first = keep(&mut all, &config(&[("d", "")]), file(1));
        let given = keep(&mut all, &config(&[("d", ", serial: MINE")]), file(1));
        assert_eq!((given.serial.as_str(), given.naa), ("MINE", first.naa));
        let kept: Identities = serde_json::from_str(&serde_json::to_string(&all).unwrap()).unwrap();
        assert_eq!(kept, all);
        // It is kept, because initiators know the unit by this name now.
        assert_eq!(
            keep(&mut all, &config(&[("d", "")]), file(1)).serial,
            "MINE"
        );
    }

    #[test]
    fn names_configured_elsewhere_are_dropped() {
        let mut all = Identities::default();
        let mine = ", serial: MINE, naa: 3123456789abcdef";
        let before = keep(&mut all, &config(&[("d", mine)]), file(1));
        let moved = config(&[("d", ""), ("e", mine)]);
        let after = keep(&mut all, &moved, file(1));
        assert_ne!(after.serial, before.serial);
        assert_ne!(after.naa, before.naa);
    }

    #[test]
    fn reused_inode_is_new_disk() {
        let mut all = Identities::default();
        let first = keep(&mut all, &config(&[("d", "")]), file(1));
        let Found::File(old) = file(1) else {
            unreachable!("it is a file");
        };
        let new = Found::File(FileId {
            born: Some(7),
            ..old
        });
        assert_ne!(keep(&mut all, &config(&[("e", "")]), new), first);
    }

    #[test]
    fn missing_disk_changes_cache_generation() {
        let mut all = Identities::default();
        keep(&mut all, &config(&[("d", "")]), file(1));
        let before = all.cache_generation("d", [7; 16]);
        assert_eq!(before, [7; 16]);
        for is_missing in [true, true, false, false] {
            all.set_missing("d", is_missing);
            keep(&mut all, &config(&[("d", "")]), file(1));
        }
        let after = all.cache_generation("d", [7; 16]);
        assert_ne!(after, before);
        // It is found by another process.
        all.set_missing("d", true);
        let text = serde_json::to_string(&all).unwrap();
        let mut all: Identities = serde_json::from_str(&text).unwrap();
        all.set_missing("d", false);
        let third = all.cache_generation("d", [7; 16]);
        assert!(![before, after].contains(&third));
        // The same if the file was replaced.
        keep(&mut all, &config(&[("d", "")]), file(2));
        let fourth = all.cache_generation("d", [7; 16]);
        assert!(![before, after, third].contains(&fourth));
        keep(&mut all, &config(&[("d", "")]), file(2));
        assert_eq!(all.cache_generation("d", [7; 16]), fourth);
    }

    #[test]
    fn host_rename_keeps_names() {
        let mut all = Identities {
            host: Some("as it was".into()),
            ..Identities::default()
        };
        assert_eq!(all.host(&config(&[])), HostId::new("as it was"));
    }
}
