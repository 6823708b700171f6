//! Detects disks that may have lost data in the write cache, and how this is reported to
//! initiators.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::{Duration, Instant};
use std::{fs, io};

use riser_scsi::config::Identity;
use riser_scsi::reservation::{ReservationKeeper, SavedReservations};
use riser_testkit::eventually_ok;
use riser_testkit::hung_mount::{HungMount, Silence};
use riser_testkit::skip::skip;

use super::LOCK_WAIT;
use super::portals::tests::{Dir, problems, retry};
use crate::backend::{
    FlushFailure, FlushKeeper, OpenedStores, Store, fail_next_recovery, open_in_time, query,
};
use crate::config::Config;
use crate::control::identities::IdentityFile;
use crate::control::state::StateDir;
use crate::server::handover::ServerState;
use crate::server::identities::{Identities, IdentityKeeper};
use crate::server::problems::Subject;
use crate::server::reload::ChangeError;
use crate::server::{Keepers, Server};

/// Reservations that cannot be read while the flag is set.
#[derive(Debug, Default)]
struct Unreadable(AtomicBool);

impl ReservationKeeper for Unreadable {
    fn load(&self, _: &Identity) -> io::Result<Option<SavedReservations>> {
        match self.0.load(Ordering::Relaxed) {
            true => Err(io::Error::other("damaged")),
            false => Ok(None),
        }
    }

    fn save(&self, _: &Identity, _: Option<&SavedReservations>) -> io::Result<()> {
        Ok(())
    }
}

/// A state directory that is full while the flag is set.
#[derive(Debug)]
struct Full {
    inner: Arc<dyn IdentityKeeper>,
    is_full: AtomicBool,
}

impl IdentityKeeper for Full {
    fn load(&self) -> io::Result<Identities> {
        self.inner.load()
    }

    fn save(&self, all: &Identities) -> io::Result<()> {
        match self.is_full.load(Ordering::Relaxed) {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => self.inner.save(all),
        }
    }
}

fn disk(dir: &Path, more: &str) -> Config {
    disk_of(dir, more, "")
}

/// Returns a configuration with a disk, and a target with additional keys.
fn disk_of(dir: &Path, more: &str, target: &str) -> Config {
    static PORTAL: AtomicU16 = AtomicU16::new(4290);
    let port = PORTAL.fetch_add(1, Ordering::Relaxed);
    let text = format!(
        "backends: {{ a: {{ kind: file, path: {}/a, size: 1MiB{more} }} }}\n\
         targets:\n\
         - name: t\n\
         \x20 iqn: iqn.2026-01.com.example:t\n\
         \x20 portals: [{{ protocol: iscsi, listen: \"127.97.8.19:{port}\" }}]\n\
         \x20 luns: {{ 0: a }}\n\
         \x20 access: open\n\
         {target}\
         workers: {{ count: 1 }}\n",
        dir.display()
    );
    Config::parse(&text, "test.yaml").unwrap_or_else(|error| panic!("{error}"))
}

fn generation(server: &Server) -> Option<[u8; 16]> {
    let unit = server.unit_on("a").unwrap();
    assert!(unit.lu.has_medium());
    unit.lu.config().cache_generation
}

fn start(config: &Config, keepers: &Keepers) -> Server {
    Server::start_after(config, &ServerState::default(), keepers.clone()).unwrap()
}

/// Starts a server and shuts it down. Returns the cache generation of the disk.
fn serve(config: &Config, keepers: &Keepers) -> Option<[u8; 16]> {
    let server = start(config, keepers);
    let generation = generation(&server);
    server.shutdown().unwrap();
    generation
}

fn away(dir: &Dir) {
    fs::rename(dir.0.join("a"), dir.0.join("away")).unwrap();
}

fn back(dir: &Dir) {
    fs::rename(dir.0.join("away"), dir.0.join("a")).unwrap();
}

/// Checks that the disk can be opened now, and that a loss is reported to initiators.
fn assert_loss(mut server: Server, before: Option<[u8; 16]>) {
    retry(&mut server).unwrap();
    assert_eq!(problems(&server), []);
    let after = generation(&server);
    server.shutdown().unwrap();
    assert_ne!(
        before, after,
        "the disk was missing, and no loss is reported"
    );
}

/// Returns for each type of loss whether it is detected, for a disk with these names.
fn losses(dir: &Dir, names: &str, keepers: &Keepers) -> [bool; 3] {
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    fs::write(dir.0.join("other"), vec![0; 1 << 20]).unwrap();
    let config = disk(&dir.0, names);
    let first = serve(&config, keepers);
    // The disk is missing at startup, and returns later.
    away(dir);
    let mut server = start(&config, keepers);
    back(dir);
    retry(&mut server).unwrap();
    let second = generation(&server);
    server.shutdown().unwrap();
    // The disk is missing at startup, and returns before the next startup.
    away(dir);
    start(&config, keepers).shutdown().unwrap();
    back(dir);
    let third = serve(&config, keepers);
    // It is replaced by a different disk.
    fs::rename(dir.0.join("other"), dir.0.join("a")).unwrap();
    let fourth = serve(&config, keepers);
    [second != first, third != second, fourth != third]
}

fn keepers(dir: &Dir) -> Keepers {
    let state = dir.0.join("state");
    fs::create_dir(&state).unwrap();
    let state = Arc::new(StateDir::lock(&state).unwrap());
    Keepers {
        identities: Some(Arc::new(IdentityFile::new(state))),
        ..Keepers::default()
    }
}

#[test]
fn losses_are_detected_for_all_names() {
    for naa in [
        "",
        ", naa: 3123456789abcdef",
        ", naa: 6001405abcdef0123456789abcdef012",
    ] {
        let dir = Dir::new("losses");
        assert_eq!(losses(&dir, naa, &keepers(&dir)), [true; 3], "{naa}");
    }
}

/// The stored names cannot be read at first. When they can, the disk is still missing.
#[test]
fn missing_disk_is_loss_without_names() {
    let dir = Dir::new("unread-names");
    let keepers = keepers(&dir);
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let config = disk(&dir.0, ", serial: MINE, naa: 3123456789abcdef");
    let first = serve(&config, &keepers);
    let file = dir.0.join("state/identities.json");
    let kept = fs::read(&file).unwrap();
    fs::write(&file, "{").unwrap();
    away(&dir);
    let mut server = start(&config, &keepers);
    fs::write(&file, &kept).unwrap();
    retry(&mut server).unwrap();
    back(&dir);
    assert_loss(server, first);
}

/// The disk returns before the names can be read, and then the daemon is restarted.
#[test]
fn returning_disk_is_loss_without_names() {
    let dir = Dir::new("unread-back");
    let keepers = keepers(&dir);
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let config = disk(&dir.0, ", serial: MINE, naa: 3123456789abcdef");
    let first = serve(&config, &keepers);
    let file = dir.0.join("state/identities.json");
    let kept = fs::read(&file).unwrap();
    fs::write(&file, "{").unwrap();
    away(&dir);
    let mut server = start(&config, &keepers);
    back(&dir);
    retry(&mut server).unwrap();
    generation(&server);
    fs::write(&file, &kept).unwrap();
    retry(&mut server).unwrap();
    assert_eq!(problems(&server), []);
    server.shutdown().unwrap();
    let last = serve(&config, &keepers);
    assert_ne!(first, last);
}

/// The start fails because of the disk, or for a different reason.
#[test]
fn missing_disk_at_failed_start_is_loss() {
    for is_strict in [true, false] {
        let dir = Dir::new("failed-start");
        let keepers = keepers(&dir);
        fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
        let secret = dir.0.join("secret");
        fs::write(&secret, "0123456789abcdef").unwrap();
        let chap = match is_strict {
            true => String::new(),
            false => format!(
                "  chap: {{ users: [{{ name: u, secret_file: {} }}] }}\n",
                secret.display()
            ),
        };
        let mut config = disk_of(&dir.0, "", &chap);
        config.strict = is_strict;
        let first = serve(&config, &keepers);
        away(&dir);
        fs::remove_file(&secret).unwrap();
        Server::start_after(&config, &ServerState::default(), keepers.clone()).unwrap_err();
        fs::write(&secret, "0123456789abcdef").unwrap();
        back(&dir);
        let second = serve(&config, &keepers);
        assert_ne!(first, second, "strict: {is_strict}");
    }
}

/// The problem is reported until there is room to store the loss.
#[test]
fn unsaved_loss_is_reported() {
    let dir = Dir::new("full-state");
    let full = Arc::new(Full {
        inner: keepers(&dir).identities.unwrap(),
        is_full: AtomicBool::new(false),
    });
    let keepers = Keepers {
        identities: Some(full.clone()),
        ..Keepers::default()
    };
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let config = disk(&dir.0, "");
    let first = serve(&config, &keepers);
    full.is_full.store(true, Ordering::Relaxed);
    away(&dir);
    let mut server = start(&config, &keepers);
    back(&dir);
    retry(&mut server).unwrap();
    let second = generation(&server);
    assert_ne!(first, second);
    assert_eq!(problems(&server), [Subject::Identities]);
    assert!(
        server.builder.check_successor(&config).is_err(),
        "it would know nothing of the loss"
    );
    full.is_full.store(false, Ordering::Relaxed);
    retry(&mut server).unwrap();
    assert_eq!(problems(&server), []);
    server.shutdown().unwrap();
    assert_eq!(serve(&config, &keepers), second);
    // In strict mode, this is an error like any other missing resource.
    away(&dir);
    start(&config, &keepers).shutdown().unwrap();
    back(&dir);
    full.is_full.store(true, Ordering::Relaxed);
    let mut strict = config.clone();
    strict.strict = true;
    let error = Server::start_after(&strict, &ServerState::default(), keepers).unwrap_err();
    assert!(error.to_string().contains("was missing"), "{error}");
}

/// Another program locks the file for a long time.
#[test]
fn locked_disk_is_loss_without_reservations() {
    let dir = Dir::new("left-out-locked");
    let reservations = Arc::new(Unreadable::default());
    let keepers = Keepers {
        reservations: Some(reservations.clone()),
        ..keepers(&dir)
    };
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let config = disk(&dir.0, "");
    let first = serve(&config, &keepers);
    reservations.0.store(true, Ordering::Relaxed);
    let mut server = start(&config, &keepers);
    let held = open_in_time(&config.backends[0].spec, false).unwrap();
    retry(&mut server).unwrap();
    let absent = server.builder.absent.get_mut("a").unwrap();
    absent.awaited.as_mut().unwrap().since -= LOCK_WAIT * 2;
    retry(&mut server).unwrap();
    drop(held);
    reservations.0.store(false, Ordering::Relaxed);
    assert_loss(server, first);
}

/// At first, the reservations cannot be read, then the disk is missing.
#[test]
fn missing_disk_is_loss_without_reservations() {
    let dir = Dir::new("unread-reservations");
    let reservations = Arc::new(Unreadable::default());
    let keepers = Keepers {
        reservations: Some(reservations.clone()),
        ..keepers(&dir)
    };
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let config = disk(&dir.0, "");
    let first = serve(&config, &keepers);
    reservations.0.store(true, Ordering::Relaxed);
    let mut server = start(&config, &keepers);
    assert!(!server.unit_on("a").unwrap().lu.has_medium());
    away(&dir);
    retry(&mut server).unwrap();
    let all = server.problems();
    let (_, problem) = all.iter().next().unwrap();
    assert!(
        problem.why.contains("No such file") || problem.why.contains("missing"),
        "{}",
        problem.why
    );
    back(&dir);
    reservations.0.store(false, Ordering::Relaxed);
    assert_loss(server, first);
}

/// The file system may not be mounted.
#[test]
fn missing_disk_with_naa_is_not_created() {
    for naa in ["3123456789abcdef", "6001405abcdef0123456789abcdef012"] {
        let dir = Dir::new("unmade");
        let keepers = keepers(&dir);
        let config = disk(&dir.0, &format!(", create: true, naa: {naa}"));
        start(&config, &keepers).shutdown().unwrap();
        away(&dir);
        let server = start(&config, &keepers);
        let is_served = server.unit_on("a").unwrap().lu.has_medium();
        server.shutdown().unwrap();
        assert!(!is_served, "{naa}: an empty disk is served in its place");
    }
}

/// A device was removed, a flush has failed, and then the device is opened again. There may be no
/// state directory, or the failure may not be saved yet.
#[test]
fn returning_disk_keeps_flush_failure() {
    let dir = Dir::new("failed-flush");
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let config = disk(&dir.0, "");
    let mut server = Server::start(&config).unwrap();
    let store = |server: &Server| {
        let mut open = server.builder.open();
        Arc::clone(open.next().unwrap().1)
    };
    let before = store(&server);
    before.on_flush_failed(libc::EIO, Instant::now());
    let failure = before.flush_failure();
    away(&dir);
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let spec = &config.backends[0].spec;
    let mut opened = OpenedStores::default();
    opened.insert("a", spec, open_in_time(spec, false));
    server.retry(opened).unwrap();
    let after = store(&server);
    assert!(!Arc::ptr_eq(&before, &after));
    assert!(failure.is_some() && after.flush_failure() == failure);
    // A request of the previous device may still fail.
    assert_eq!(server.clear_flush_failure(None).unwrap(), 1);
    assert_eq!(after.flush_failure(), None);
    before.on_flush_failed(libc::EIO, Instant::now());
    assert!(after.flush_failure().is_some());
    server.shutdown().unwrap_err();
}

/// Workers would wait for the descriptor that is opened after the failure was cleared.
#[test]
fn hung_file_system_keeps_flush_failure() {
    let dir = Dir::new("failed-hung");
    let mount = match HungMount::new(&dir.0.join("mount"), 1 << 20) {
        Ok(mount) => mount,
        Err(error) => {
            return skip("hung_file_system_keeps_flush_failure", &error.to_string());
        }
    };
    std::os::unix::fs::symlink(mount.file(), dir.0.join("a")).unwrap();
    let server = Server::start(&disk(&dir.0, "")).unwrap();
    let store = Arc::clone(server.builder.open().next().unwrap().1);
    store.on_flush_failed(libc::EIO, Instant::now());
    mount.hang(Silence::All);
    let error = server.clear_flush_failure(None).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(mount.pending() > 0 && store.flush_failure().is_some());
    mount.resume();
    let cleared = || server.clear_flush_failure(None);
    eventually_ok("the failure is cleared", Duration::from_secs(60), cleared);
    assert_eq!(store.flush_failure(), None);
    drop(store);
    server.shutdown().unwrap();
}

/// Another disk must not look as if it did not respond, because it is cleared next.
#[test]
fn refused_clearing_leaves_no_query() {
    let dir = Dir::new("refused-clearing");
    for name in ["a", "b"] {
        fs::write(dir.0.join(name), vec![0; 1 << 20]).unwrap();
    }
    let text = disk(&dir.0, "")
        .to_yaml()
        .replace(
            "backends:\n",
            &format!(
                "backends:\n  b: {{ kind: file, path: {}/b }}\n",
                dir.0.display()
            ),
        )
        .replace("luns:\n", "luns:\n      1: b\n");
    let config =
        Config::parse(&text, "test.yaml").unwrap_or_else(|error| panic!("{error}: {text}"));
    let server = Server::start(&config).unwrap();
    let stores: Vec<_> = server
        .builder
        .open()
        .map(|(name, store)| (name.to_owned(), Arc::clone(store)))
        .collect();
    assert_eq!(stores.len(), 2);
    for (_, store) in &stores {
        store.on_flush_failed(libc::EIO, Instant::now());
    }
    let (_, hung) = stores.iter().find(|(name, _)| name == "a").unwrap();
    let release = query::hang(hung);
    let error = server.clear_flush_failure(None).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    let serial = server
        .unit_on("b")
        .unwrap()
        .lu
        .config()
        .identity
        .serial
        .clone();
    assert_eq!(server.clear_flush_failure(Some(&serial)).unwrap(), 1);
    drop((release, stores));
    server.shutdown().unwrap_err();
}

/// Removing a disk from the configuration is not a confirmation that the loss was handled.
#[test]
fn removed_disk_keeps_flush_failure() {
    let dir = Dir::new("failed-removed");
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let config = disk(&dir.0, "");
    let mut server = Server::start(&config).unwrap();
    let store = |server: &Server| server.builder.open().next().map(|(_, s)| Arc::clone(s));
    let before = store(&server).unwrap();
    before.on_flush_failed(libc::EIO, Instant::now());
    drop(before);
    let mut without = config.clone();
    without.targets[0].luns.clear();
    server.change(without).unwrap();
    assert!(store(&server).is_none());
    server.change(config).unwrap();
    assert!(store(&server).unwrap().flush_failure().is_some());
    assert_eq!(server.clear_flush_failure(None).unwrap(), 1);
    server.shutdown().unwrap();
}

/// A flush of a hanging device fails after its LUN was removed.
#[test]
fn removed_disk_keeps_late_flush_failure() {
    let dir = Dir::new("failed-late");
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let config = disk(&dir.0, "");
    let mut server = Server::start(&config).unwrap();
    let store = |server: &Server| server.builder.open().next().map(|(_, s)| Arc::clone(s));
    let before = store(&server).unwrap();
    let mut without = config.clone();
    without.targets[0].luns.clear();
    server.change(without.clone()).unwrap();
    before.on_flush_failed(libc::EIO, Instant::now());
    drop(before);
    server.change(without).unwrap();
    server.change(config).unwrap();
    assert!(store(&server).unwrap().flush_failure().is_some());
    assert_eq!(server.clear_flush_failure(None).unwrap(), 1);
    server.shutdown().unwrap();
}

/// State directory without space.
#[derive(Debug, Default)]
struct FullFlushes {
    is_full: AtomicBool,
    attempts: AtomicU16,
    saved: AtomicBool,
}

impl FlushKeeper for FullFlushes {
    fn load(&self, _: &Identity) -> io::Result<Option<FlushFailure>> {
        Ok(None)
    }

    fn save(&self, _: &Identity, failure: Option<&FlushFailure>) -> io::Result<()> {
        let is_full = self.is_full.load(Ordering::Relaxed);
        self.attempts.fetch_add(1, Ordering::Relaxed);
        if is_full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.saved.store(failure.is_some(), Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn removed_disk_saves_flush_failure_at_shutdown() {
    let dir = Dir::new("failed-unsaved");
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let config = disk(&dir.0, "");
    let flushes = Arc::new(FullFlushes::default());
    let keepers = Keepers {
        flushes: Some(flushes.clone()),
        ..Keepers::default()
    };
    let mut server = start(&config, &keepers);
    flushes.is_full.store(true, Ordering::Relaxed);
    let (_, store) = server.builder.open().next().unwrap();
    store.on_flush_failed(libc::EIO, Instant::now());
    while flushes.attempts.load(Ordering::Relaxed) == 0 {
        std::thread::yield_now();
    }
    let mut without = config.clone();
    without.targets[0].luns.clear();
    server.change(without).unwrap();
    flushes.is_full.store(false, Ordering::Relaxed);
    server.shutdown().unwrap();
    assert!(flushes.saved.load(Ordering::Relaxed));
}

/// The thread of a removed disk receives the error of a failed flush during the shutdown.
#[test]
fn shutdown_waits_for_removed_disk() {
    let dir = Dir::new("failed-removing");
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let config = disk(&dir.0, "");
    let flushes = Arc::new(FullFlushes::default());
    let keepers = Keepers {
        flushes: Some(flushes.clone()),
        ..Keepers::default()
    };
    let mut server = start(&config, &keepers);
    let store = Arc::clone(server.builder.open().next().unwrap().1);
    let entry = store.list_thread();
    let mut without = config.clone();
    without.targets[0].luns.clear();
    server.change(without).unwrap();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(700));
        store.on_flush_failed(libc::EIO, Instant::now());
        drop(entry);
    });
    server.shutdown().unwrap();
    assert!(flushes.saved.load(Ordering::Relaxed));
    thread.join().unwrap();
}

/// A disk was opened too late to be served. Its recovery has received the error of a failed
/// write-back, which the next process does not receive.
#[test]
fn unserved_disk_saves_lost_flush_at_shutdown() {
    let dir = Dir::new("lost-flush");
    let config = disk(&dir.0, ", create: true, protection: { type: 1 }");
    let flushes = Arc::new(FullFlushes::default());
    let keepers = Keepers {
        flushes: Some(flushes.clone()),
        ..keepers(&dir)
    };
    serve(&config, &keepers);
    away(&dir);
    let server = start(&config, &keepers);
    back(&dir);
    fail_next_recovery(&dir.0.join("a"));
    drop(Store::open(&config.backends[0].spec).unwrap());
    assert!(!flushes.saved.load(Ordering::Relaxed));
    server.shutdown().unwrap();
    assert!(flushes.saved.load(Ordering::Relaxed));
}

/// Returns whether the cache of a disk is still valid if its file was locked at startup.
/// `meanwhile` is called before the file is opened.
fn keeps_cache(
    name: &str,
    meanwhile: impl FnOnce(&mut Server, &Config, Box<dyn FnOnce()>),
) -> bool {
    let dir = Dir::new(name);
    for file in ["a", "other"] {
        fs::write(dir.0.join(file), vec![0; 1 << 20]).unwrap();
    }
    let config = disk(&dir.0, "");
    let mut server = Server::start(&config).unwrap();
    let before = generation(&server);
    server.shutdown().unwrap();
    let held = open_in_time(&config.backends[0].spec, false).unwrap();
    server = Server::start(&config).unwrap();
    assert!(is_awaited(&server));
    meanwhile(&mut server, &config, Box::new(move || drop(held)));
    if !server.unit_on("a").unwrap().lu.has_medium() {
        retry(&mut server).unwrap();
    }
    let after = generation(&server);
    server.shutdown().unwrap();
    after == before
}

fn is_awaited(server: &Server) -> bool {
    server.unit_on("a").unwrap().lu.awaits_medium()
}

/// If a daemon was killed, the kernel may keep its lock for longer than we wait at startup.
#[test]
fn locked_disk_becomes_ready_without_loss() {
    assert!(keeps_cache("locked", |server, _, release| {
        retry(server).unwrap();
        assert!(is_awaited(server));
        release();
    }));
    // If the lock is held for a long time, it belongs to another program, which may change the
    // disk.
    assert!(!keeps_cache("locked-long", |server, _, release| {
        let absent = server.builder.absent.get_mut("a").unwrap();
        absent.awaited.as_mut().unwrap().since -= LOCK_WAIT * 2;
        retry(server).unwrap();
        assert!(!is_awaited(server));
        release();
    }));
    // Unless it is released before the next retry.
    assert!(keeps_cache("locked-longer", |server, _, release| {
        let absent = server.builder.absent.get_mut("a").unwrap();
        absent.awaited.as_mut().unwrap().since -= LOCK_WAIT * 2;
        release();
    }));
}

#[test]
fn replaced_disk_after_lock_is_loss() {
    let path = |config: &Config, name| {
        let path = config.backends[0].spec.source.path().unwrap();
        path.with_file_name(name)
    };
    assert!(!keeps_cache("exchanged", |_, config, release| {
        fs::rename(path(config, "other"), path(config, "a")).unwrap();
        release();
    }));
    assert!(!keeps_cache("elsewhere", |server, config, release| {
        let [a, other] = ["a", "other"].map(|name| path(config, name).display().to_string());
        let text = config.to_yaml().replace(&a, &other);
        let other = Config::parse(&text, "test.yaml").unwrap();
        server.change(other).unwrap();
        release();
    }));
    assert!(!keeps_cache("missing", |server, config, release| {
        fs::rename(path(config, "a"), path(config, "away")).unwrap();
        retry(server).unwrap();
        assert!(!is_awaited(server));
        fs::rename(path(config, "away"), path(config, "a")).unwrap();
        release();
    }));
}

/// If a change was rejected, problems detected by it must not be reported to initiators, not even
/// after a restart.
#[test]
fn rejected_change_keeps_waiting_for_disk() {
    let dir = Dir::new("refused");
    let keepers = keepers(&dir);
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let config = disk(&dir.0, "");
    let before = serve(&config, &keepers);
    let held = open_in_time(&config.backends[0].spec, false).unwrap();
    let mut server = start(&config, &keepers);
    assert!(is_awaited(&server));
    away(&dir);
    let mut other = config.clone();
    other.limits.queue_depth /= 2;
    let refuse = || Err(ChangeError::NeedsRestart("no".into()));
    server.change_if(other, refuse).unwrap_err();
    assert!(is_awaited(&server));
    back(&dir);
    drop(held);
    retry(&mut server).unwrap();
    assert_eq!(generation(&server), before);
    server.shutdown().unwrap();
    assert_eq!(serve(&config, &keepers), before);
}

/// In strict mode, the start fails, but the disk is not affected.
#[test]
fn configuration_error_is_not_loss() {
    let dir = Dir::new("mistake");
    let keepers = keepers(&dir);
    fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
    let mut config = disk(&dir.0, "");
    config.strict = true;
    let first = serve(&config, &keepers);
    for (right, wrong) in [("1MiB", "2MiB"), ("/a", "/b")] {
        let text = config.to_yaml().replace(right, wrong);
        let wrong = Config::parse(&text, "test.yaml").unwrap_or_else(|e| panic!("{e}"));
        assert_ne!(wrong.backends[0].spec, config.backends[0].spec);
        Server::start_after(&wrong, &ServerState::default(), keepers.clone()).unwrap_err();
    }
    assert_eq!(serve(&config, &keepers), first);
}
