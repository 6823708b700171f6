//! Unit names, and how to handle stored names that cannot be read.
//!
//! With different names, initiators would see different disks. Therefore, we do not derive any
//! names in this case. Units and SRP portals with configured names are available. All others are
//! added when the file can be read, and it is not written before that. If the file is missing, we
//! do not derive names either while the daemon is running, because it may have been moved before it
//! is restored.

use std::path::PathBuf;

use super::Builder;
use crate::backend::{OpenError, Store, random_generation};
use crate::config::{Backend, Config, Portal, Protocol};
use crate::server::ServerError;
use crate::server::identities::{Found, Identities};
use crate::server::problems::Subject;
use crate::worker::portals::Unserved;

impl Builder {
    /// Reads the stored names.
    pub(super) fn read_identities(&mut self) {
        if let Some(keeper) = &self.keepers.identities {
            match keeper.load() {
                // If ports are known, this installation has been used before, and the file was
                // removed. Derive the same names again instead of using random names.
                Ok(kept) if kept == Identities::default() && self.ports.is_empty() => {
                    let random = u128::from_ne_bytes(random_generation()) as u64;
                    self.identities = Identities::of_new_host(random);
                }
                Ok(kept) => self.identities = kept,
                Err(error) => self.unread = Some(error.to_string()),
            }
        }
    }

    /// Tries to read the stored names again, after an error.
    pub(super) fn read_identities_again(&mut self, config: &Config) {
        let (Some(keeper), Some(_)) = (&self.keepers.identities, &self.unread) else {
            return;
        };
        match keeper.load() {
            Ok(kept) if kept == Identities::default() => {
                self.unread = Some("identities.json is missing".to_owned());
            }
            Ok(kept) => {
                let meanwhile = std::mem::replace(&mut self.identities, kept);
                self.unread = None;
                self.identities.add_losses(&meanwhile);
                self.keep_configured(config);
            }
            Err(error) => self.unread = Some(error.to_string()),
        }
    }

    /// Also stores the names of units that were added in the meantime.
    fn keep_configured(&mut self, config: &Config) {
        for backend in &config.backends {
            let unit = self.units.get(&backend.name);
            if let Some(unit) = unit.filter(|unit| unit.lu.has_medium()) {
                let place = self.unit_stores[unit.index.0 as usize];
                let store = self.opened[place].as_ref();
                let found = store.map_or(Found::Nothing, |s| self.found(&backend.name, s));
                let mut identity = unit.lu.config().identity.clone();
                self.identities.keep(config, backend, found, &mut identity);
            }
        }
    }

    /// Returns an error if names cannot be derived.
    fn unnamed(&self) -> Option<OpenError> {
        let why = self.unread.clone()?;
        Some(OpenError::Unnamed { why })
    }

    /// Returns an error if the unit of a backend does not have names.
    pub(super) fn unnamed_unit(&self, backend: &Backend) -> Option<OpenError> {
        let names = &backend.names;
        let are_given = names.serial.is_some() && names.naa.is_some();
        self.unnamed().filter(|_| !are_given)
    }

    /// Returns true if a portal does not have names.
    pub(super) fn is_unnamed_portal(&self, config: &Config, portal: &Portal) -> bool {
        let is_derived = config.identity.is_none() && portal.set_ioc_guid.is_none();
        self.unread.is_some() && portal.protocol == Protocol::Srp && is_derived
    }

    /// Reports portals without names as problems.
    ///
    /// # Errors
    /// [`ServerError::Unnamed`] if they are required.
    pub(super) fn go_without_names(&mut self, config: &Config) -> Result<(), ServerError> {
        let mut unnamed = std::mem::take(&mut self.unnamed_portals);
        unnamed.clear();
        let Some(why) = self.unnamed() else {
            return Ok(());
        };
        let targets = config.targets.iter().zip(&self.expansion.targets);
        for (target, listens) in targets {
            let portals = listens
                .iter()
                .filter(|at| self.is_unnamed_portal(config, &target.portals[at.portal]));
            let portals = portals.map(|at| Unserved {
                portal: at.at,
                why: why.to_string(),
            });
            unnamed.extend(portals);
        }
        let subjects = unnamed.iter();
        let mut subjects = subjects.map(|portal| Subject::RdmaPortal(portal.portal));
        if !self.tolerates(&Subject::Identities) || !subjects.all(|s| self.tolerates(&s)) {
            return Err(ServerError::Unnamed(why.to_string()));
        }
        self.problems.add(Subject::Identities, &why);
        self.unnamed_portals = unnamed;
        Ok(())
    }

    /// Returns the SRP portals without names.
    pub(in crate::server) fn unnamed_portals(&self) -> &[Unserved] {
        &self.unnamed_portals
    }

    /// Returns the generation of the volatile cache of a backend.
    pub(super) fn cache_generation(&self, backend: &Backend, store: &Store) -> [u8; 16] {
        match self.unread {
            // We don't know how often the disk was missing, so we don't know the state of its cache
            // either.
            Some(_) if store.ram().is_none() => random_generation(),
            _ => {
                let generation = store.cache_generation();
                self.identities.cache_generation(&backend.name, generation)
            }
        }
    }

    /// Stores the names of units before they are used. See [`Builder::undo`] if they are not used
    /// in the end. If the stored names cannot be read, they are not changed, and we report a
    /// problem, or an error if there are names that are not in `known`. If losses cannot be stored,
    /// we report a problem too, or an error if this is required at startup.
    ///
    /// # Errors
    /// [`ServerError::Identities`], [`ServerError::Losses`], [`ServerError::Unnamed`].
    pub(in crate::server) fn save_identities(
        &mut self,
        known: Option<&Self>,
    ) -> Result<(), ServerError> {
        let is_known =
            |all: &Self| known.is_some_and(|k| k.identities.has_names_of(&all.identities));
        match self.write_identities() {
            Ok(()) if self.unread.is_some() => {}
            Ok(()) => self.problems.remove(&Subject::Identities),
            Err(error @ ServerError::Unnamed(_)) if is_known(self) => {
                self.problems.add(Subject::Identities, &error);
            }
            Err(error @ ServerError::Losses(_))
                if known.is_some() || self.tolerates(&Subject::Identities) =>
            {
                self.problems.add(Subject::Identities, &error);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Records missing disks after a failed start, because they may be back at the next start.
    pub(in crate::server) fn write_missing(&self, missing: &[(String, PathBuf)]) {
        let (Some(keeper), None) = (&self.keepers.identities, &self.unread) else {
            return;
        };
        let written = keeper.load().and_then(|saved| {
            let mut identities = saved.clone();
            // We have never written to a disk with a different path.
            let known = missing.iter().filter(|(name, at)| saved.is_at(name, at));
            known.for_each(|(name, _)| identities.set_missing(name, true));
            match identities == saved {
                true => Ok(()),
                false => keeper.save(&identities),
            }
        });
        if let Err(error) = written {
            tracing::warn!(%error, "cannot save the list of missing disks");
        }
    }

    /// Keeps the stored state of missing disks when a start is reverted.
    pub(in crate::server) fn keep_missing(&mut self) {
        let keeper = self.keepers.identities.as_ref();
        // If it cannot be read, we cannot write it either.
        if let Some(Ok(saved)) = keeper.map(|keeper| keeper.load()) {
            self.identities.add_missing(&saved);
        }
    }

    /// Stores the names, unless the stored names could not be read.
    pub(super) fn write_identities(&self) -> Result<(), ServerError> {
        let (Some(keeper), None) = (&self.keepers.identities, &self.unread) else {
            return Ok(());
        };
        let saved = keeper.load().map_err(|error| {
            let why = error.to_string();
            ServerError::Unnamed(OpenError::Unnamed { why }.to_string())
        })?;
        let identities = &self.identities;
        if saved == *identities {
            return Ok(());
        }
        match keeper.save(identities) {
            Err(error) if !saved.has_names_of(identities) => Err(ServerError::Identities(error)),
            Err(error) if !saved.has_losses_of(identities) => Err(ServerError::Losses(error)),
            // Only the file IDs have changed, which is not a reason to fail.
            Err(error) => {
                tracing::warn!(%error, "cannot save the file IDs of backends");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Checks that the next process can read the stored names and losses.
    ///
    /// # Errors
    /// [`ServerError::Identities`], [`ServerError::Losses`], [`ServerError::Unnamed`].
    pub(super) fn check_identities(&self) -> Result<(), ServerError> {
        if let Some(why) = self.unnamed() {
            return Err(ServerError::Unnamed(why.to_string()));
        }
        self.write_identities()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::sync::Arc;

    use riser_scsi::config::Identity;

    use crate::backend::open_all;
    use crate::config::Config;
    use crate::control::identities::IdentityFile;
    use crate::control::state::StateDir;
    use crate::server::handover::ServerState;
    use crate::server::problems::Subject;
    use crate::server::{Keepers, Server, ServerError};

    /// Returns a configuration with two unnamed disks and a named disk.
    fn config(dir: &Path, at: &str, rest: &str) -> Config {
        let text = format!(
            "backends:\n\
             \x20 a: {{ kind: file, path: {}/a, size: 1MiB, create: true }}\n\
             \x20 b: {{ kind: ram, size: 1MiB }}\n\
             \x20 c: {{ kind: ram, size: 1MiB, serial: MINE, naa: 3123456789abcdef }}\n\
             \x20 d: {{ kind: ram, size: 1MiB }}\n\
             targets:\n\
             - name: t\n\
             \x20 iqn: iqn.2026-01.com.example:t\n\
             \x20 portals:\n\
             \x20 - {{ protocol: iscsi, listen: \"{at}:3290\" }}\n\
             \x20 - {{ protocol: srp, listen: {at} }}\n\
             \x20 luns: {{ 0: a, 1: b, 2: c }}\n\
             \x20 access: open\n\
             workers: {{ count: 1 }}\n{rest}",
            dir.display()
        );
        Config::parse(&text, "test.yaml").unwrap_or_else(|error| panic!("{error}"))
    }

    fn start(config: &Config, dir: &Arc<StateDir>) -> Result<Server, ServerError> {
        let keepers = Keepers {
            identities: Some(Arc::new(IdentityFile::new(Arc::clone(dir)))),
            ..Keepers::default()
        };
        Server::start_after(config, &ServerState::default(), keepers)
    }

    fn retry(server: &mut Server) {
        assert!(server.check_resources());
        let opened = open_all(server.open_requests());
        server.retry(opened).unwrap();
    }

    fn identity(server: &Server, name: &str) -> Identity {
        server.unit_on(name).unwrap().lu.config().identity.clone()
    }

    fn is_served(server: &Server) -> [bool; 3] {
        ["a", "b", "c"].map(|name| {
            let lu = &server.unit_on(name).unwrap().lu;
            assert_eq!(lu.has_names(), lu.has_medium());
            lu.has_medium()
        })
    }

    fn problems(server: &Server) -> Vec<(&'static str, String)> {
        let all = server.problems();
        let named = |(subject, _): (&Subject, _)| (subject.kind(), subject.name());
        all.iter().map(named).collect()
    }

    #[test]
    fn unreadable_names_are_not_replaced() {
        const AT: &str = "127.97.8.6";
        let dir = format!("riserd-names-{}", std::process::id());
        let dir = std::env::temp_dir().join(dir);
        let _ = fs::remove_dir_all(&dir);
        let state = Arc::new(StateDir::lock(&dir).unwrap());
        let strict = config(&dir, AT, "strict: true\n");
        let (config, file) = (config(&dir, AT, ""), dir.join("identities.json"));
        let server = start(&config, &state).unwrap();
        let before = ["a", "b", "c"].map(|name| identity(&server, name));
        server.shutdown().unwrap();
        let kept = fs::read_to_string(&file).unwrap();
        // As if the names were derived on a different host.
        let mut other: serde_json::Value = serde_json::from_str(&kept).unwrap();
        other["host"] = "before".into();
        let kept = other.to_string();

        fs::write(&file, "{").unwrap();
        let error = start(&strict, &state).unwrap_err().to_string();
        for said in ["identities.json: ", "from a backup", "new disks"] {
            assert!(error.contains(said), "{error}");
        }
        // A missing disk file is not created either.
        fs::remove_file(dir.join("a")).unwrap();
        let mut server = start(&config, &state).unwrap();
        assert_eq!(is_served(&server), [false, false, true]);
        assert_eq!(identity(&server, "c"), before[2]);
        assert_eq!(server.addresses(), ["127.97.8.6:3290".parse().unwrap()]);
        let missing = [
            ("backend", "a".to_owned()),
            ("backend", "b".to_owned()),
            ("portal", "127.97.8.6:5555".to_owned()),
            ("state", "identities.json".to_owned()),
        ];
        assert_eq!(problems(&server), missing);
        let all = server.problems();
        assert!(all.iter().all(|(_, p)| p.why.contains("identities.json: ")));
        assert!(server.builder.check_successor(&config).is_err());
        for damaged in ["{\"version\": 2}", ""] {
            fs::write(&file, damaged).unwrap();
            retry(&mut server);
            server.change(config.clone()).unwrap();
            assert_eq!(problems(&server), missing);
            assert_eq!(fs::read_to_string(&file).unwrap(), damaged);
        }
        // The file was moved before it is restored.
        fs::remove_file(&file).unwrap();
        retry(&mut server);
        assert_eq!(is_served(&server), [false, false, true]);
        assert!(!file.exists() && !dir.join("a").exists());

        fs::write(&file, &kept).unwrap();
        fs::write(dir.join("a"), vec![0; 1 << 20]).unwrap();
        retry(&mut server);
        assert_eq!(problems(&server), []);
        assert_eq!(is_served(&server), [true; 3]);
        assert_eq!(["a", "b", "c"].map(|name| identity(&server, name)), before);
        assert_eq!(server.addresses().len(), 2);
        let now: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(now["host"], "before");
        server.shutdown().unwrap();
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn unreadable_names_only_affect_new_units() {
        let dir = format!("riserd-names-later-{}", std::process::id());
        let dir = std::env::temp_dir().join(dir);
        let _ = fs::remove_dir_all(&dir);
        let state = Arc::new(StateDir::lock(&dir).unwrap());
        let file = dir.join("identities.json");
        let before = config(&dir, "127.97.8.7", "");
        let mut server = start(&before, &state).unwrap();
        let kept = fs::read(&file).unwrap();
        fs::write(&file, "{").unwrap();
        let mut more = before.clone();
        more.limits.queue_depth /= 2;
        server.change(more.clone()).unwrap();
        assert_eq!(problems(&server).len(), 1);
        let place = more.backends.iter().position(|b| b.name == "d").unwrap();
        let mut lun = more.targets[0].luns[&0];
        lun.backend = place;
        more.targets[0].luns.insert(3, lun);
        let error = server.change(more.clone()).unwrap_err().to_string();
        assert!(error.contains("from a backup"), "{error}");
        assert!(server.unit_on("d").is_none());
        assert_eq!(fs::read(&file).unwrap(), b"{");
        assert!(server.builder.check_successor(server.config()).is_err());
        fs::write(&file, &kept).unwrap();
        retry(&mut server);
        assert_eq!(problems(&server), []);
        server.change(more).unwrap();
        assert!(server.unit_on("d").unwrap().lu.has_medium());
        server.shutdown().unwrap();
        fs::remove_dir_all(&dir).unwrap();
    }
}
