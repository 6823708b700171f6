//! Tests for files that are created or extended for a configuration that is not used in the end.

use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use riser_testkit::{eventually, eventually_ok, eventually_some};

use super::handover::ServerState;
use super::identities::{Identities, IdentityKeeper};
use super::reload::ChangeError;
use super::{Keepers, Server, ServerError};
use crate::backend::{HANGING_UNDO, OpenRequest, open_all};
use crate::config::Config;

/// Timeout for a file system to respond again.
const PATIENCE: Duration = Duration::from_secs(60);

/// Stores names in memory.
#[derive(Debug, Default)]
struct Names(Mutex<Identities>);

impl IdentityKeeper for Names {
    fn load(&self) -> std::io::Result<Identities> {
        Ok(self.0.lock().unwrap().clone())
    }

    fn save(&self, identities: &Identities) -> std::io::Result<()> {
        *self.0.lock().unwrap() = identities.clone();
        Ok(())
    }
}

/// A temporary directory for a test.
struct Dir(PathBuf);

impl Dir {
    fn new(test: &str) -> Self {
        let name = format!("riserd-files-{test}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn len(&self, file: &str) -> Option<u64> {
        Some(std::fs::metadata(self.0.join(file)).ok()?.len())
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns a configuration with files of 2 MiB, which are created if necessary.
fn config(dir: &Path, listen: &str, files: &[&str], more: &str) -> Config {
    let dir = dir.display();
    let backends = files.iter().map(|name| {
        format!("  {name}: {{ kind: file, path: {dir}/{name}, size: 2MiB, create: true }}\n")
    });
    let luns = files.iter().enumerate();
    let luns: Vec<_> = luns.map(|(lun, name)| format!("{lun}: {name}")).collect();
    let text = format!(
        "backends:\n{}targets:\n\
         - name: iqn.2026-01.com.example:t\n\
         \x20 portals: [{{ protocol: iscsi, listen: \"{listen}\" }}]\n\
         \x20 luns: {{ {} }}\n\
         \x20 access: open\n\
         workers: {{ count: 1 }}\n{more}",
        backends.collect::<String>(),
        luns.join(", ")
    );
    Config::parse(&text, "test.yaml").unwrap_or_else(|error| panic!("{error}"))
}

fn start(config: &Config, names: &Arc<Names>) -> Result<Server, ServerError> {
    start_patiently(config, names, Duration::ZERO)
}

fn start_patiently(
    config: &Config,
    names: &Arc<Names>,
    patience: Duration,
) -> Result<Server, ServerError> {
    let keepers = Keepers {
        identities: Some(Arc::clone(names) as Arc<dyn IdentityKeeper>),
        ..Keepers::default()
    };
    Server::start_patiently(config, &ServerState::default(), keepers, patience)
}

/// A failed start does not change any files, and the next start can still create them.
#[test]
fn failed_start_leaves_no_files() {
    const LISTEN: &str = "127.97.9.1:3290";
    let (dir, names) = (Dir::new("start"), Arc::new(Names::default()));
    let old = std::fs::File::create(dir.0.join("old")).unwrap();
    old.set_len(1 << 20).unwrap();
    // Another program uses the portal.
    let taken = TcpListener::bind(LISTEN).unwrap();
    let wanted = config(&dir.0, LISTEN, &["old", "new"], "");
    let error = start(&wanted, &names).unwrap_err();
    assert!(error.is_in_use(), "{error}");
    assert_eq!((dir.len("old"), dir.len("new")), (Some(1 << 20), None));
    drop(taken);
    // This error is only detected when all backends are open.
    let chap = "discovery_chap: { users: [{ name: me, secret_file: /nowhere/secret }] }\n";
    let error = start(&config(&dir.0, LISTEN, &["old", "new"], chap), &names).unwrap_err();
    assert!(matches!(error, ServerError::Secret { .. }), "{error}");
    assert_eq!((dir.len("old"), dir.len("new")), (Some(1 << 20), None));
    let server = start(&wanted, &names).unwrap();
    assert_eq!(server.problems().iter().count(), 0);
    assert_eq!(
        (dir.len("old"), dir.len("new")),
        (Some(2 << 20), Some(2 << 20))
    );
    server.shutdown().unwrap();
    assert_eq!(dir.len("new"), Some(2 << 20));
}

/// If files were opened again, they could be created, extended and removed each time.
#[test]
fn waiting_start_opens_files_once() {
    const LISTEN: &str = "127.97.9.4:3290";
    let (dir, names) = (Dir::new("wait"), Arc::new(Names::default()));
    let taken = TcpListener::bind(LISTEN).unwrap();
    let wanted = config(&dir.0, LISTEN, &["new"], "");
    let path = dir.0.join("new");
    let (server, first) = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let open = || std::fs::File::open(&path).ok();
            // Keep this open, so that its inode number is not reused.
            let first = eventually_some("the file is there", Duration::from_secs(20), open);
            drop(taken);
            first
        });
        let server = start_patiently(&wanted, &names, Duration::from_secs(20));
        (server.unwrap(), other.join().unwrap())
    });
    let served = std::fs::metadata(&path).unwrap();
    assert_eq!(served.ino(), first.metadata().unwrap().ino());
    server.shutdown().unwrap();
}

/// The same for a change.
#[test]
fn file_can_be_created_after_rejection() {
    const LISTEN: &str = "127.97.9.2:3290";
    let (dir, names) = (Dir::new("change"), Arc::new(Names::default()));
    let mut server = start(&config(&dir.0, LISTEN, &["old"], ""), &names).unwrap();
    let wanted = config(&dir.0, LISTEN, &["old", "new"], "");
    let refused = server.change_if(wanted.clone(), || {
        Err(ChangeError::NeedsRestart("no".to_owned()))
    });
    assert!(refused.is_err());
    assert_eq!((dir.len("old"), dir.len("new")), (Some(2 << 20), None));
    server.shutdown().unwrap();
    let server = start(&wanted, &names).unwrap();
    assert_eq!(server.problems().iter().count(), 0);
    assert_eq!(dir.len("new"), Some(2 << 20));
    server.shutdown().unwrap();
}

/// If a file system does not respond, this blocks a single thread, but not the threads that control
/// the server.
#[test]
fn blocked_undo_is_completed_later() {
    const LISTEN: &str = "127.97.9.3:3290";
    let (dir, names) = (Dir::new("later"), Arc::new(Names::default()));
    let mut server = start(&config(&dir.0, LISTEN, &["old"], ""), &names).unwrap();
    let wanted = config(&dir.0, LISTEN, &["old", "new"], "");
    let (release, hangs) = channel();
    *HANGING_UNDO.lock().unwrap() = Some((dir.0.join("new"), hangs));
    let refused = server.change_if(wanted.clone(), || {
        Err(ChangeError::NeedsRestart("no".to_owned()))
    });
    assert!(refused.is_err());
    assert_eq!(dir.len("new"), Some(2 << 20), "the thread waits");
    let error = server.change(wanted.clone()).unwrap_err().to_string();
    assert!(error.contains("does not respond"), "{error}");
    drop(release);
    eventually_ok("the file system responds", PATIENCE, || {
        server.change(wanted.clone())
    });
    assert_eq!(dir.len("new"), Some(2 << 20));

    // The same for a file that was opened but is not used.
    let (release, hangs) = channel();
    *HANGING_UNDO.lock().unwrap() = Some((dir.0.join("third"), hangs));
    let third = config(&dir.0, LISTEN, &["third"], "");
    let wish = OpenRequest {
        backend: "third".to_owned(),
        spec: third.backends[0].spec.clone(),
        is_patient: false,
        is_known: false,
    };
    drop(open_all(vec![wish]));
    assert!(dir.len("third").is_some(), "the thread waits");
    drop(release);
    eventually("it is taken back", PATIENCE, || dir.len("third").is_none());
    server.shutdown().unwrap();
}
