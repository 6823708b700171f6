//! Initiators using different protocols that read and write the same few blocks of a unit. A single
//! history is used to verify the results.
//!
//! - [`Initiator`]: an initiator port in this process, which has a single session at a time.
//! - [`Contest`]: runs several initiators at the same time, and also clients of an NBD export.

use std::net::Ipv4Addr;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use riser_block::task::block_on;
use riser_initiator::engine::{Client, Session};
use riser_initiator::lun::Lun;
use riser_initiator::session::Timing;
use riser_initiator::url::TargetUrl;
use riser_testkit::eventually_ok;

use crate::history::{BLOCK, History, Port};
use crate::load::{Chance, Kind, Nbd, Op};

pub const IQN: &str = "iqn.2026-01.com.example:contended";

/// Size of the disk in blocks. All writers use the whole disk.
pub const DISK: Range<u64> = 0..48;
const LONGEST: u64 = 20;

/// Size of the disk in bytes.
pub const SIZE: u64 = DISK.end * BLOCK as u64;

/// Default number of threads per initiator, and of clients for an NBD export.
const THREADS: u64 = 2;

/// Timeout for any operation, which should be enough for a slow machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Returns the riserd configuration for a target that has a portal for each protocol on
/// 127.0.`network`.1.
pub fn portals(network: u8) -> String {
    portals_at(loopback(network, 1))
}

/// Same, but uses the given address.
pub fn portals_at(address: Ipv4Addr) -> String {
    let portals = ["srp", "iser", "iscsi"]
        .map(|protocol| format!("{{ protocol: {protocol}, listen: {address} }}"));
    format!("iqn: {IQN}\nportals: [{}]", portals.join(", "))
}

fn loopback(network: u8, host: u16) -> Ipv4Addr {
    Ipv4Addr::new(127, 0, network, host as u8)
}

/// Returns the URL of the unit for a protocol.
pub fn url(scheme: &str, target: Ipv4Addr) -> String {
    match scheme {
        "srp" => format!("srp://{target}/0"),
        _ => format!("{scheme}://{target}/{IQN}/0"),
    }
}

/// An initiator port, which has a single session at a time.
pub struct Initiator {
    scheme: &'static str,
    client: Client,
    url: TargetUrl,
    port: Port,
    lun: Mutex<Lun>,
    /// Set while the session is being replaced. In this case, its outstanding commands will fail.
    is_replacing: AtomicBool,
    cut: AtomicU64,
}

impl Initiator {
    /// Logs in to the target created by [`portals`], using the given addresses for the target and
    /// host.
    pub fn new(scheme: &'static str, target: Ipv4Addr, host: Ipv4Addr, port: u16) -> Arc<Self> {
        let timing = Timing {
            attempt: Duration::from_millis(400),
            tsk_mgmt: Duration::from_millis(800),
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_millis(200),
            ..Timing::default()
        };
        let builder = Client::builder()
            .pool(2 << 20)
            .timing(timing)
            .spin(Duration::from_micros(10))
            .port(0x0123_4567_0000_0000 | u64::from(port) << 24);
        let client = match scheme {
            "iscsi" => builder.without_device(),
            _ => builder.open(host.into()),
        };
        let client = client.unwrap();
        let url: TargetUrl = url(scheme, target).parse().unwrap();
        let lun = log_in(&client, &url);
        Arc::new(Self {
            scheme,
            url,
            client,
            port: Port(port),
            lun: Mutex::new(lun),
            is_replacing: AtomicBool::new(false),
            cut: AtomicU64::new(0),
        })
    }

    fn lun(&self) -> Lun {
        self.lun
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn session(&self) -> Session {
        self.lun().session().clone()
    }

    /// Replaces the session with a new session for the same initiator port while there are
    /// outstanding commands.
    pub fn replace(&self) {
        self.is_replacing.store(true, Ordering::SeqCst);
        block_on(self.session().close());
        let lun = log_in(&self.client, &self.url);
        *self.lun.lock().unwrap() = lun;
        self.is_replacing.store(false, Ordering::SeqCst);
    }

    fn work(&self, history: &History, chance: &mut Chance, done: &AtomicU64, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            let op = Op::of_kinds(Kind::OF_SCSI, chance, &DISK, LONGEST);
            let mut lun = self.lun();
            match op.carry_out(&mut lun, self.port, history) {
                Ok(()) => {
                    done.fetch_add(1, Ordering::Relaxed);
                }
                // The only valid reason to fail is that the session was closed: the old session
                // doesn't retry any commands, not even after a unit attention.
                Err(error) => {
                    let is_excused = self.is_replacing.load(Ordering::SeqCst)
                        || !std::ptr::eq(self.lun().session().status(), lun.session().status());
                    assert!(is_excused, "{op:?} over {}: {error:?}", self.scheme);
                    self.cut.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }
}

fn log_in(client: &Client, url: &TargetUrl) -> Lun {
    // If the daemon was just started, it may not be ready yet.
    eventually_ok(&format!("a login to {url}"), PATIENCE, || {
        let session = block_on(client.connect(url.clone())).map_err(|e| e.to_string())?;
        block_on(session.with_timeout(PATIENCE).lun(0)).map_err(|e| e.to_string())
    })
}

/// A worker thread and the number of operations it has completed.
struct Worker {
    scheme: &'static str,
    done: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Worker {
    fn end(self) -> u64 {
        self.thread.join().unwrap();
        self.done.load(Ordering::Relaxed)
    }
}

/// Initiators that use the same disk of [`DISK`] blocks, which must be set to zero at the start.
pub struct Contest {
    history: Arc<History>,
    pub initiators: Vec<Arc<Initiator>>,
    /// Number of threads per initiator, and of clients for an NBD export.
    threads: u64,
    seed: u64,
    stop: Arc<AtomicBool>,
    workers: Vec<Worker>,
}

impl Contest {
    /// Returns the history of the disk.
    #[must_use]
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Logs in to the target created by [`portals`] with an initiator for each protocol, and starts
    /// the load.
    pub fn new(schemes: &[&'static str], network: u8, seed: u64) -> Self {
        let target = loopback(network, 1);
        let initiator = |(scheme, port): (&&'static str, u16)| {
            Initiator::new(scheme, target, loopback(network, port + 1), port)
        };
        Self::of(
            schemes.iter().zip(1..).map(initiator).collect(),
            THREADS,
            seed,
        )
    }

    /// Starts the load on these initiators using several threads for each. Ports are numbered
    /// starting at 1.
    pub fn of(initiators: Vec<Arc<Initiator>>, threads: u64, seed: u64) -> Self {
        let mut contest = Self {
            history: Arc::new(History::new(DISK.end as usize).with_repeats()),
            initiators,
            threads,
            seed,
            stop: Arc::default(),
            workers: Vec::new(),
        };
        for initiator in contest.initiators.clone() {
            for stream in 0..threads {
                let stream = u64::from(initiator.port.0) << 8 | stream;
                let (scheme, initiator) = (initiator.scheme, Arc::clone(&initiator));
                let work = move |history: &_, chance: &mut _, done: &_, stop: &_| {
                    initiator.work(history, chance, done, stop);
                };
                contest.start(scheme, stream, work);
            }
        }
        contest
    }

    /// Adds clients for an NBD export of the same disk, using a separate port. The requests should
    /// never fail, because the export retries any commands without a response.
    pub fn add_nbd(&mut self, socket: &Path) {
        let ports = self.workers.len() as u64 / self.threads;
        let port = Port(ports as u16 + 1);
        for stream in 0..self.threads {
            let mut disk = Nbd::connect(socket);
            let stream = u64::from(port.0) << 8 | stream;
            let work =
                move |history: &History, chance: &mut _, done: &AtomicU64, stop: &AtomicBool| {
                    while !stop.load(Ordering::Relaxed) {
                        let op = Op::of_kinds(Kind::OF_DISKS, chance, &DISK, LONGEST);
                        if let Err(error) = op.carry_out(&mut disk, port, history) {
                            panic!("{op:?} over NBD: {error:?}");
                        }
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                };
            self.start("nbd", stream, work);
        }
    }

    fn start(
        &mut self,
        scheme: &'static str,
        stream: u64,
        mut work: impl FnMut(&History, &mut Chance, &AtomicU64, &AtomicBool) + Send + 'static,
    ) {
        let (history, stop) = (Arc::clone(&self.history), Arc::clone(&self.stop));
        let mut chance = Chance::new(self.seed, stream);
        let done: Arc<AtomicU64> = Arc::default();
        let thread = thread::spawn({
            let done = Arc::clone(&done);
            move || work(&history, &mut chance, &done, &stop)
        });
        self.workers.push(Worker {
            scheme,
            done,
            thread,
        });
    }

    /// Returns the number of completed operations.
    pub fn done(&self) -> u64 {
        self.counts().iter().sum()
    }

    /// Returns the number of versions kept in the history for all blocks.
    pub fn versions(&self) -> usize {
        self.history.versions()
    }

    /// Returns the number of successful COMPARE AND WRITE commands.
    pub fn swapped(&self) -> u64 {
        self.history.swapped()
    }

    fn counts(&self) -> Vec<u64> {
        let all = self.workers.iter();
        all.map(|worker| worker.done.load(Ordering::Relaxed))
            .collect()
    }

    /// Waits until every thread has completed `more` operations.
    pub fn wait_progress(&mut self, what: &str, more: u64) {
        let before = self.counts();
        let until = Instant::now() + PATIENCE;
        while self
            .counts()
            .iter()
            .zip(&before)
            .any(|(now, before)| now - before < more)
        {
            if let Some(at) = self.workers.iter().position(|w| w.thread.is_finished()) {
                panic!("{what}: {:?}", self.workers.remove(at).thread.join());
            }
            let downs = || -> Vec<_> {
                let all = self.initiators.iter();
                all.map(|i| i.session().status().last_down()).collect()
            };
            assert!(
                Instant::now() < until,
                "{what}: {:?}, {:?}",
                self.counts(),
                downs()
            );
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops the load and reads the whole disk again with each initiator. Returns a summary.
    pub fn end(mut self) -> String {
        self.stop.store(true, Ordering::Relaxed);
        let mut done = Vec::new();
        let mut workers = self.workers.drain(..).peekable();
        while let Some(&Worker { scheme, .. }) = workers.peek() {
            // The threads of a port were started in sequence.
            let of_port = workers
                .by_ref()
                .take(self.threads as usize)
                .map(Worker::end);
            done.push((scheme, of_port.sum::<u64>()));
        }
        drop(workers);
        for _ in 0..2 {
            for initiator in &self.initiators {
                let read = Op::read(DISK);
                read.carry_out(&mut initiator.lun(), initiator.port, &self.history)
                    .unwrap();
            }
        }
        assert_eq!(self.history.lost(), 0, "all have responses");
        let of = |(at, (scheme, done)): (usize, (&str, u64))| match self.initiators.get(at) {
            None => format!("{done} over {scheme}"),
            Some(initiator) => {
                let cut = initiator.cut.load(Ordering::Relaxed);
                let reconnects = initiator.session().status().reconnects();
                format!("{done} over {scheme} ({cut} cut, {reconnects} reconnects)")
            }
        };
        let all: Vec<_> = done.into_iter().enumerate().map(of).collect();
        all.join(", ")
    }
}

impl Drop for Contest {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
