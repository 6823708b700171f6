//! A NIC, its lock and its thread.
//!
//! All contexts of a process on one device share one [`Engine`]. A call of the program takes the
//! lock, does its work, and drives the NIC where it may have to wait for something: so a program
//! that polls needs no other thread. The engine's thread drives the NIC where no call does:
//!
//! - While polls drive the NIC it only looks once in a [`TICK`] whether they still do. Other calls
//!   only send: meanwhile it watches the socket as well.
//! - Otherwise it drives the NIC itself, and sleeps until a packet comes or a timer is due. The next
//!   call that drives the NIC wakes it once, since its sleep may be too long for the timers of what
//!   that call has started.
//! - A program may wait for a peer's WRITE by looking at its memory. Where packets come while no call
//!   drives the NIC, calls leave the socket watched, so that the next packet wakes the thread at once,
//!   until the program polls for what it waits for again.
//! - It also takes in what comes to the sockets that processes share (`share`).
//! - A device whose interface is gone is removed: its thread ends, and a call that opens the
//!   device after that gets another engine.
//! - A program that has armed a completion queue is about to sleep itself. Its next poll that finds
//!   nothing has the socket watched, so that a packet wakes the thread at once.
//! - A call that waits for a notification ([`Engine::drive_until`]) drives the NIC in the thread's
//!   place: a packet then wakes the program, and not the thread which wakes the program.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::thread;
use std::time::{Duration, Instant};
use std::{io, iter, ptr};

use riser_transport::roce::nic::NicLimits;
use riser_transport::roce::nic::rdma_cm::port_space;
use riser_transport::roce::steer::Requests;
use riser_transport::roce::{Roce, RoceConfig, RoceFaults};
use riser_transport::verbs::{
    AsyncEvent, CmEvent, CmId, Completion, CqId, PdId, PortSpace, Provider, QpId, RdmaCm, SrqId,
    TimedCompletion, Verbs, VerbsError, XrcdId,
};
use riser_transport::wire::ROCE_PORT;
use riser_transport::wire::mad::MadClass;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use tracing::{error, warn};

use crate::administration::Administration;
use crate::cancel::{self, Cleanup, Uncancellable, step};
use crate::command::Family;
use crate::errno::Errno;
use crate::lock::unpoisoned;
use crate::share::{self, Opening, Share};

/// Interval at which the thread looks whether calls still drive the NIC.
const TICK: Duration = Duration::from_millis(1);

/// Polls with completions after which the thread no longer expects packets that no poll takes in.
const EAGER: u32 = 64;

/// Posts that follow each other within this time belong together.
const BURST: Duration = Duration::from_micros(10);

/// Most rounds of the NIC in a row under the lock, so that calls get it in between.
const ROUNDS: usize = 16;

/// Most descriptors that a sleep is about.
const MAX_INPUTS: usize = 8;

/// Most packets from elsewhere than the NIC's socket in a row, likewise.
const PACKETS: usize = 64;

/// A device as the environment configures it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    pub(crate) name: String,
    pub(crate) addr: IpAddr,
    /// Its further addresses, for paths of connections.
    pub(crate) other_addrs: Vec<IpAddr>,
    /// Address of the fabric's subnet administrator, if it has one.
    pub(crate) administrator: Option<IpAddr>,
    pub(crate) faults: RoceFaults,
    /// File to capture packets to, without the process id that follows.
    pub(crate) capture: Option<PathBuf>,
}

impl Config {
    /// All its addresses, in the order of the GID table.
    pub(crate) fn addrs(&self) -> impl Iterator<Item = IpAddr> {
        iter::once(self.addr).chain(self.other_addrs.iter().copied())
    }

    /// This process's file to capture packets to. One that is forked has another.
    fn capture_file(&self) -> Option<PathBuf> {
        let mut file = self.capture.clone()?.into_os_string();
        file.push(format!(".{}", std::process::id()));
        Some(file.into())
    }
}

/// A NIC with its lock.
pub(crate) struct Engine {
    state: Mutex<State>,
    /// Wakes the thread.
    wake: OwnedFd,
    /// Wakes a call that drives the NIC in the thread's place. Each has its own, since what one reads
    /// does not wake the other.
    wake_call: OwnedFd,
    /// What becomes readable when something comes to the NIC. Numbers, not duplicates, which a
    /// process that is forked would keep open.
    inputs: Vec<RawFd>,
    /// It belongs to the process that this one was forked from: its sockets are gone.
    is_inherited: AtomicBool,
    /// The device was removed, as its state says under the lock.
    is_removed: Arc<AtomicBool>,
}

/// An object of the program that asynchronous events are about.
pub(crate) trait Reports: Send {
    fn report(&self, event: AsyncEvent);

    /// Address of the program's structure.
    fn address(&self) -> usize;

    /// Whether it belongs to the context of a number.
    fn is_of(&self, context: u64) -> bool;
}

/// A completion queue of the program.
pub(crate) trait Fires: Reports {
    /// Notifies the program. Returns whether it waited for that.
    fn fire(&self) -> bool;
}

/// Name of an XRC domain: device and inode of its file.
pub(crate) type File = (u64, u64);

/// What the lock protects.
pub(crate) struct State {
    pub(crate) nic: Roce,
    /// Objects of the program by the handles of the NIC.
    pub(crate) cqs: HashMap<CqId, Box<dyn Fires>>,
    /// Those of a queue pair that is shared are several.
    pub(crate) qps: HashMap<QpId, Vec<Box<dyn Reports>>>,
    /// Queue pairs that can be opened, by their domains and numbers.
    pub(crate) targets: HashMap<(XrcdId, u32), QpId>,
    /// XRC domains that have a file, and how often they are open.
    pub(crate) xrc_domains: Vec<(File, XrcdId, u32)>,
    /// Protection domains, with the contexts that may import them.
    pub(crate) pds: HashMap<PdId, Family>,
    pub(crate) srqs: HashMap<SrqId, Box<dyn Reports>>,
    /// The contexts, by numbers of their own.
    pub(crate) contexts: HashMap<u64, Box<dyn Reports>>,
    /// What takes the events of the connection manager, once it is used.
    pub(crate) on_cm_event: Option<fn(&mut State, CmEvent)>,
    /// What programs with libibumad ask of administrators, once one has done so.
    pub(crate) administration: Option<Administration>,
    administrator: Option<IpAddr>,
    share: Share,
    /// Ports of identifiers with whether these listen, and the number of identifiers of each.
    ports: HashMap<CmId, (share::Port, bool)>,
    port_users: HashMap<share::Port, u32>,
    /// Completions on their way to the program.
    completions: Vec<Completion>,
    timed: Vec<TimedCompletion>,
    /// Completion queues that a program has armed and that have not fired.
    armed: usize,
    /// Polls that must still find completions by themselves before the socket is no longer watched at
    /// all times: packets have come while no call drove the NIC.
    eager: u32,
    /// When posts were sent last.
    sent_at: Instant,
    /// A call has driven the NIC since the thread looked.
    is_driven: bool,
    /// That call was a poll, which takes packets in as well.
    is_polled: bool,
    /// What drives the NIC may sleep for longer than a tick.
    is_asleep: bool,
    /// A call waits and drives the NIC, in the thread's place.
    is_waited: bool,
    /// It has waited since the thread looked.
    was_waited: bool,
    /// The thread sleeps until the call wakes it.
    is_away: bool,
    is_removed: Arc<AtomicBool>,
}

/// The locked engine. What has happened is reported to the program when it is dropped.
pub(crate) struct Locked<'a> {
    state: MutexGuard<'a, State>,
    engine: &'a Engine,
    /// Dropped after the lock is released.
    _uncancellable: Uncancellable,
}

/// Engines by the names of their devices.
pub(crate) type Engines = Vec<(String, Arc<Engine>)>;

/// The engines of this process. They stay when their last context is closed: programs open a device
/// again and again, and a process that forks has to know every socket that it has.
pub(crate) static ENGINES: Mutex<Engines> = Mutex::new(Vec::new());

impl Engine {
    /// The engine of a device, which is opened where this process has not done so. That may take a few
    /// seconds, where a process at its address is stopped.
    ///
    /// # Errors
    /// Those of [`share::await_others`] and [`Share::open`], of [`Roce::open_shared`], and of making a thread.
    pub(crate) fn open(config: &Config) -> io::Result<Arc<Self>> {
        let _uncancellable = Uncancellable::new();
        let lock = || {
            let mut engines = unpoisoned(ENGINES.lock());
            engines.retain(|(_, engine)| !engine.is_removed());
            let known = engines.iter().find(|(name, _)| *name == config.name);
            let known = known.map(|(_, engine)| Arc::clone(engine));
            (engines, known)
        };
        if let (_, Some(engine)) = lock() {
            return Ok(engine);
        }
        let until = Instant::now() + share::LONGEST;
        let (mut engines, share) = loop {
            // Without the lock, for which a thread that forks waits.
            let silent = share::await_others(config.addr, until)?;
            let (engines, known) = lock();
            if let Some(engine) = known {
                return Ok(engine);
            }
            // Another process may have been sooner.
            if let Some(opening) = Opening::begin(config.addr)? {
                break (engines, Share::open(opening, silent)?);
            }
        };
        let config_of_nic = RoceConfig {
            other_addrs: config.other_addrs.clone(),
            worker_index: share.slot(),
            worker_bits: share::BITS,
            requests: Requests::ToFirst,
            is_removable: true,
            limits: limits(),
            faults: config.faults,
            capture: config.capture_file(),
            ..RoceConfig::new(config.addr)
        };
        let nic = open_nic(config, &config_of_nic, &share)?;
        let inputs = nic.event_fds().into_iter().chain(share.inputs());
        let inputs = inputs.map(|fd| fd.as_raw_fd()).collect();
        let is_removed = Arc::new(AtomicBool::new(false));
        let engine = Arc::new(Self {
            state: Mutex::new(State {
                nic,
                cqs: HashMap::new(),
                qps: HashMap::new(),
                targets: HashMap::new(),
                xrc_domains: Vec::new(),
                pds: HashMap::new(),
                srqs: HashMap::new(),
                contexts: HashMap::new(),
                on_cm_event: None,
                administration: None,
                administrator: config.administrator,
                share,
                ports: HashMap::new(),
                port_users: HashMap::new(),
                completions: Vec::new(),
                timed: Vec::new(),
                armed: 0,
                eager: 0,
                sent_at: Instant::now(),
                is_driven: false,
                is_polled: false,
                is_asleep: false,
                is_waited: false,
                was_waited: false,
                is_away: false,
                is_removed: Arc::clone(&is_removed),
            }),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            wake_call: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            inputs,
            is_inherited: AtomicBool::new(false),
            is_removed,
        });
        let driven = Arc::clone(&engine);
        crate::thread::spawn(format!("riser-{}", config.name), move || run(&driven))?;
        engines.push((config.name.clone(), Arc::clone(&engine)));
        HANDLERS.call_once(|| {
            // SAFETY: the function may be called at any time.
            unsafe { libc::atexit(flush) };
        });
        Ok(engine)
    }

    /// Takes the lock.
    pub(crate) fn lock(&self) -> Locked<'_> {
        let uncancellable = Uncancellable::new();
        let state = unpoisoned(self.state.lock());
        Locked {
            state,
            engine: self,
            _uncancellable: uncancellable,
        }
    }

    /// The lock itself, for `fork`.
    pub(crate) fn state(&self) -> &Mutex<State> {
        &self.state
    }

    /// Notes that this process is a copy of the one that has the engine.
    pub(crate) fn inherit(&self) {
        self.is_inherited.store(true, Ordering::Release);
    }

    /// Whether it belongs to the process that this one was forked from.
    pub(crate) fn is_inherited(&self) -> bool {
        self.is_inherited.load(Ordering::Acquire)
    }

    /// Whether the device was removed: its objects fail, and another engine can be opened.
    pub(crate) fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Acquire)
    }

    /// The descriptors that wake threads.
    pub(crate) fn wake_fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.wake.as_fd(), self.wake_call.as_fd()]
    }

    /// Wakes the thread, or the call that drives the NIC in its place.
    fn wake(&self, is_waited: bool) {
        let fd = if is_waited {
            &self.wake_call
        } else {
            &self.wake
        };
        let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
    }

    /// Drives the NIC in the place of the thread until a queue of events has one, for a call that
    /// waits for that. Returns early if another call already does so, and for a signal: true then.
    ///
    /// The thread may be cancelled in its sleep. Then the engine's thread drives the NIC again.
    ///
    /// # Safety
    /// The descriptor is open. No frame up to the program's has anything to drop.
    pub(crate) unsafe fn drive_until(&'static self, events: RawFd) -> bool {
        if !step(|| self.begin_driving()) {
            return false;
        }
        let cleanup = Cleanup {
            routine: stop_driving,
            argument: ptr::from_ref(self).cast_mut().cast(),
        };
        let mut woken = Woken::default();
        while !woken.has_events && !woken.is_interrupted {
            let mut sleep = step(|| {
                let timeout = self.lock().take_turn(woken.has_input);
                self.plan_sleep(timeout, Some(events))
            });
            // SAFETY: as the caller promises.
            let ready = unsafe { sleep.wait(Some(cleanup)) };
            woken = step(|| self.end_sleep(&sleep, ready));
        }
        step(|| self.end_driving());
        woken.is_interrupted
    }

    /// Makes a waiting call the driver of the NIC, unless another call is or the engine belongs to the
    /// parent process.
    fn begin_driving(&self) -> bool {
        if self.is_inherited() {
            return false;
        }
        let state = &mut self.lock().state;
        if std::mem::replace(&mut state.is_waited, true) {
            return false;
        }
        state.was_waited = true;
        // The thread no longer has to check arriving packets.
        if std::mem::take(&mut state.is_asleep) {
            self.wake(false);
        }
        true
    }

    /// Makes the thread the driver again.
    fn end_driving(&self) {
        let mut locked = self.lock();
        locked.state.is_waited = false;
        // The thread looks within a tick, unless it is away.
        locked.state.is_asleep = false;
        if std::mem::take(&mut locked.state.is_away) {
            self.wake(false);
        }
    }

    /// Prepares a sleep until something comes to the NIC or to a queue of events, or the timeout
    /// expires.
    fn plan_sleep(&self, timeout: Option<Duration>, events: Option<RawFd>) -> Sleep {
        // Those of a device that was removed are closed.
        let inputs = if self.is_removed() {
            &[][..]
        } else {
            &self.inputs[..]
        };
        let wake = if events.is_some() {
            &self.wake_call
        } else {
            &self.wake
        };
        let mut sleep = Sleep {
            fds: [libc::pollfd {
                fd: -1,
                events: libc::POLLIN,
                revents: 0,
            }; MAX_INPUTS],
            inputs: inputs.len(),
            has_events: events.is_some(),
            timeout: timeout.map(timespec),
        };
        let all = inputs.iter().copied().chain([wake.as_raw_fd()]);
        for (place, fd) in sleep.fds.iter_mut().zip(all.chain(events)) {
            place.fd = fd;
        }
        sleep
    }

    /// Evaluates a sleep by its return value.
    fn end_sleep(&self, sleep: &Sleep, ready: c_int) -> Woken {
        let is_interrupted = ready == -libc::EINTR;
        if ready < 0 {
            if !is_interrupted {
                let error = io::Error::from_raw_os_error(-ready);
                error!(%error, "the device's thread cannot wait");
                thread::sleep(TICK);
            }
            return Woken {
                is_interrupted,
                ..Woken::default()
            };
        }
        let is_ready = |fd: &libc::pollfd| fd.fd >= 0 && fd.revents != 0;
        let (inputs, others) = sleep.fds.split_at(sleep.inputs);
        if is_ready(&others[0]) {
            // SAFETY: the engine has the descriptor.
            let wake = unsafe { BorrowedFd::borrow_raw(others[0].fd) };
            let _ = rustix::io::read(wake, &mut [0; 8]);
        }
        Woken {
            has_input: inputs.iter().any(is_ready),
            has_events: sleep.has_events && is_ready(&others[1]),
            is_interrupted,
        }
    }
}

/// Cleanup of a call that is cancelled while it drives the NIC of an engine.
extern "C" fn stop_driving(engine: *mut c_void) {
    // SAFETY: the argument of `Engine::drive_until`, whose engine stays.
    unsafe { &*engine.cast::<Engine>() }.end_driving();
}

/// Descriptors and time of a sleep, as plain data: a cancelled thread drops nothing.
struct Sleep {
    /// Inputs of the NIC, the descriptor that wakes the sleeper, and the queue of events, if any.
    fds: [libc::pollfd; MAX_INPUTS],
    inputs: usize,
    has_events: bool,
    timeout: Option<libc::timespec>,
}

impl Sleep {
    /// # Safety
    /// As [`cancel::wait`].
    unsafe fn wait(&mut self, cleanup: Option<Cleanup>) -> c_int {
        let count = self.inputs + 1 + usize::from(self.has_events);
        // SAFETY: as the caller promises.
        unsafe { cancel::wait(&mut self.fds[..count], self.timeout, cleanup) }
    }
}

/// Opens a NIC at a process's part of its address. Only the first address is shared: where another
/// process has the further ones, the NIC has none of them.
///
/// # Errors
/// Those of [`Roce::open_shared`].
fn open_nic(device: &Config, config: &RoceConfig, share: &Share) -> io::Result<Roce> {
    Roce::open_shared(config, share.socket()?).or_else(|error| {
        if error.kind() != io::ErrorKind::AddrInUse || config.other_addrs.is_empty() {
            return Err(error);
        }
        warn!(
            "{} has the address {} alone here: further addresses are one process's at a time, and \
             {error} (`ss -aunp 'sport = {ROCE_PORT}'` lists processes)",
            device.name, device.addr
        );
        let config = RoceConfig {
            other_addrs: Vec::new(),
            ..config.clone()
        };
        Roce::open_shared(&config, share.socket()?)
    })
}

/// Why a sleep has ended, beside its time.
#[derive(Clone, Copy, Default)]
struct Woken {
    has_input: bool,
    has_events: bool,
    is_interrupted: bool,
}

fn timespec(time: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

static HANDLERS: Once = Once::new();

/// Longest wait for a device's lock when the process ends.
const FLUSH: Duration = Duration::from_millis(100);

/// Sends what waits to be sent when the process ends: acknowledgements of a peer's last messages
/// above all, which an adapter would have sent by itself, and the end of each connection, which the
/// kernel would send. The last packets reach the capture.
extern "C" fn flush() {
    let Ok(engines) = ENGINES.try_lock() else {
        return;
    };
    for (_, engine) in engines.iter() {
        let until = Instant::now() + FLUSH;
        // Bounded: a thread that ended amid a call may have left the lock taken.
        let state = loop {
            match engine.state.try_lock() {
                Err(_) if Instant::now() < until => thread::sleep(TICK),
                result => break result,
            }
        };
        if let Ok(mut state) = state {
            let now = Instant::now();
            state.nic.transmit(now);
            state.nic.end_connections(now);
            state.nic.flush_capture();
        }
    }
}

/// Limits of a device whose user is one program, which may do as it likes with its own memory.
fn limits() -> NicLimits {
    NicLimits {
        // Libraries create queues for more peers than they ever have. Only what is used takes memory.
        max_cqe: 1 << 22,
        max_ah: 1 << 16,
        max_qps_per_peer: u32::MAX,
        ..NicLimits::default()
    }
}

/// The thread: drives the NIC while no call does.
fn run(engine: &Engine) {
    let mut has_input = false;
    loop {
        let mut locked = engine.lock();
        let timeout = match locked.make_way() {
            Some(timeout) => {
                drop(locked);
                let mut wake = [PollFd::new(&engine.wake, PollFlags::IN)];
                let timeout = timeout.and_then(|timeout| timeout.try_into().ok());
                let _ = poll(&mut wake, timeout.as_ref());
                let _ = rustix::io::read(&engine.wake, &mut [0; 8]);
                continue;
            }
            None => locked.take_turn(has_input),
        };
        // The capture of a program that is killed ends a tick before it.
        locked.nic.flush_capture();
        drop(locked);
        if engine.is_removed() {
            return;
        }
        let mut sleep = engine.plan_sleep(timeout, None);
        // SAFETY: the program cannot cancel this thread.
        let ready = unsafe { sleep.wait(None) };
        has_input = engine.end_sleep(&sleep, ready).has_input;
    }
}

impl Locked<'_> {
    /// How long the thread sleeps, `Some(None)` without end, where a call drives the NIC in its
    /// place; none where it has to do that itself.
    fn make_way(&mut self) -> Option<Option<Duration>> {
        let state = &mut *self.state;
        if !state.is_waited {
            return None;
        }
        // Calls that come again and again do not wake the thread each time that they return.
        state.is_away = !std::mem::take(&mut state.was_waited);
        Some((!state.is_away).then_some(TICK))
    }

    /// A turn of what drives the NIC, the thread or a call that waits; answers how long it may sleep,
    /// `None` without end.
    fn take_turn(&mut self, has_input: bool) -> Option<Duration> {
        let state = &mut *self.state;
        let now = Instant::now();
        state.share.flush(now);
        let is_driven = std::mem::take(&mut state.is_driven);
        let is_polled = std::mem::take(&mut state.is_polled);
        let is_due = state.share.deadline().is_some_and(|at| at <= now);
        if is_polled && !has_input && !is_due && state.eager == 0 && state.armed == 0 {
            // Posts that were to leave with the next poll do not wait any longer.
            state.nic.transmit(now);
            state.is_asleep = false;
            return Some(TICK);
        }
        let rounds = state.receive_elsewhere() + state.drive();
        state.eager = match (rounds > 0, is_driven) {
            // Idle: no transfer depends on the thread.
            (false, false) => 0,
            (false, true) => state.eager,
            (true, _) => EAGER,
        };
        state.report();
        if rounds >= ROUNDS || state.nic.arm_fds() {
            return Some(Duration::ZERO);
        }
        if state.eager > 0 || is_driven || state.share.flush(now) {
            state.is_asleep = false;
            return Some(TICK);
        }
        state.is_asleep = true;
        let asked = state.administration.as_ref();
        let asked = asked.and_then(Administration::deadline);
        let deadlines = [state.nic.deadline(), state.share.deadline(), asked];
        let deadline = deadlines.into_iter().flatten().min()?;
        Some(deadline.saturating_duration_since(Instant::now()))
    }

    /// Sends what has to leave before the program goes on.
    pub(crate) fn transmit(&mut self) {
        let now = Instant::now();
        self.state.nic.transmit(now);
        self.state.sent_at = now;
        self.state.is_driven = true;
    }

    /// Sends what a call has posted, unless posts follow each other quickly: then they leave together
    /// with the next poll, or with the thread's next look.
    pub(crate) fn transmit_soon(&mut self) {
        if self.state.armed == 0 && self.state.sent_at.elapsed() < BURST {
            self.state.is_driven = true;
        } else {
            self.transmit();
        }
    }

    /// Takes up to `max` completions, of which there are none before the NIC has been driven.
    ///
    /// # Errors
    /// Those of [`Verbs::poll_cq`].
    pub(crate) fn poll_cq(&mut self, cq: CqId, max: usize) -> Result<&[Completion], VerbsError> {
        self.poll(|state| {
            state.completions.clear();
            state.nic.poll_cq(cq, max, &mut state.completions)
        })?;
        Ok(&self.state.completions)
    }

    /// Takes a completion with its time from a queue that was created for that, as
    /// [`Locked::poll_cq`].
    ///
    /// # Errors
    /// Those of [`Verbs::poll_cq_timed`].
    pub(crate) fn poll_cq_timed(
        &mut self,
        cq: CqId,
    ) -> Result<Option<TimedCompletion>, VerbsError> {
        self.poll(|state| {
            state.timed.clear();
            state.nic.poll_cq_timed(cq, 1, &mut state.timed)
        })?;
        Ok(self.state.timed.pop())
    }

    fn poll(
        &mut self,
        take: impl Fn(&mut State) -> Result<usize, VerbsError>,
    ) -> Result<(), VerbsError> {
        let state = &mut *self.state;
        let mut taken = take(state)?;
        if taken == 0 {
            state.nic.progress(Instant::now());
            state.is_driven = true;
            state.is_polled = true;
            taken = take(state)?;
            if taken == 0 && state.armed > 0 && state.nic.arm_fds() {
                // The thread looks at once instead of waiting for the descriptor.
                self.engine.wake(state.is_waited);
            }
        }
        if taken > 0 {
            state.eager = state.eager.saturating_sub(1);
        }
        Ok(())
    }

    /// Counts a completion queue that the program arms: a packet has to wake the thread from now on.
    pub(crate) fn arm(&mut self, is_first: bool) {
        if is_first {
            self.state.armed += 1;
        }
        self.transmit();
        if self.state.nic.arm_fds() {
            self.engine.wake(self.state.is_waited);
        }
    }

    /// Forgets a completion queue that was armed.
    pub(crate) fn disarm(&mut self) {
        self.state.armed -= 1;
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let state = &mut *self.state;
        state.report();
        if !state.is_driven {
            return;
        }
        let must_look = state.eager > 0 && state.nic.arm_fds();
        if must_look || state.is_asleep {
            state.is_asleep = false;
            self.engine.wake(self.state.is_waited);
        }
    }
}

impl std::ops::Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl std::ops::DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl State {
    /// Takes in packets that have come to other sockets than the NIC's. Returns the number of rounds
    /// that the NIC has had.
    ///
    /// What has come to the NIC's own before one of them goes first: a peer that confirms a connection
    /// and asks for another at once sends to both, and programs expect the events in that order.
    fn receive_elsewhere(&mut self) -> usize {
        let mut rounds = 0;
        for _ in 0..PACKETS {
            if rounds >= ROUNDS {
                break;
            }
            let Some(packet) = self.share.poll_packet(Instant::now()) else {
                break;
            };
            rounds += self.drive();
            self.nic.handle_forwarded(Instant::now(), &packet);
        }
        rounds
    }

    /// Drives the NIC until it has nothing to do, or has had its turn. Returns the number of rounds.
    fn drive(&mut self) -> usize {
        let mut rounds = 0;
        while self.nic.progress(Instant::now()) > 0 && rounds < ROUNDS {
            rounds += 1;
        }
        rounds
    }

    /// Has something done by what asks administrators.
    ///
    /// # Errors
    /// Those of [`Verbs::query_port`].
    pub(crate) fn administrate(
        &mut self,
        act: impl FnOnce(&mut Administration, &mut Roce),
    ) -> Result<(), VerbsError> {
        if self.administration.is_none() {
            let port = self.nic.query_port(1)?;
            self.nic.register_agent(MadClass::SubnetAdm)?;
            let (addr, slot) = (self.nic.socket_addr().ip(), self.share.slot());
            let made = Administration::new(addr, port.active_mtu, slot, self.administrator);
            self.administration = Some(made);
        }
        if let Some(administration) = &mut self.administration {
            act(administration, &mut self.nic);
        }
        Ok(())
    }

    /// Takes a port of the RDMA CM for an identifier, a free one where it is 0; answers which. An
    /// identifier that has one keeps it.
    ///
    /// # Errors
    /// Those of [`Share::take_port`].
    pub(crate) fn take_port(
        &mut self,
        id: CmId,
        space: PortSpace,
        port: u16,
    ) -> Result<u16, Errno> {
        let Some(space) = port_space(space) else {
            return Ok(port);
        };
        if let Some(((_, port), _)) = self.ports.get(&id) {
            return Ok(*port);
        }
        let port = self.share.take_port(space, port)?;
        self.ports.insert(id, ((space, port), false));
        *self.port_users.entry((space, port)).or_default() += 1;
        Ok(port)
    }

    /// Listens with an identifier, at its port if it has one.
    ///
    /// # Errors
    /// Those of [`RdmaCm::listen`].
    pub(crate) fn listen(&mut self, id: CmId, backlog: u32) -> Result<(), Errno> {
        self.nic.listen(id, backlog)?;
        if let Some((port, listens)) = self.ports.get_mut(&id) {
            *listens = true;
            self.share.listen(*port);
        }
        Ok(())
    }

    /// Gives the port of an identifier back, where it has one.
    pub(crate) fn give_back_port(&mut self, id: CmId) {
        let Some((port, listened)) = self.ports.remove(&id) else {
            return;
        };
        // Others that have the port do not listen.
        if listened && !self.ports.values().any(|other| *other == (port, true)) {
            self.share.stop_listening(port);
        }
        if let Some(users) = self.port_users.get_mut(&port) {
            *users -= 1;
            if *users == 0 {
                self.port_users.remove(&port);
                self.share.give_back_port(port);
            }
        }
    }

    /// Gives up the ports without giving them back: they are another process's.
    pub(crate) fn forget_ports(&mut self) {
        self.ports.clear();
        self.port_users.clear();
    }

    /// Gives up a queue pair of a program's, by the address of its structure. Returns whether no other
    /// structure is of the same queue pair: then it is to be destroyed.
    pub(crate) fn close_qp(&mut self, id: QpId, address: usize) -> bool {
        let Some(users) = self.qps.get_mut(&id) else {
            return true;
        };
        if users.iter().all(|qp| qp.address() == address) {
            return true;
        }
        users.retain(|qp| qp.address() != address);
        false
    }

    /// Destroys a queue pair. What was posted to it leaves before, as an adapter would have sent it by
    /// now: datagrams that complete unseen, for example.
    ///
    /// # Errors
    /// Those of [`Verbs::destroy_qp`].
    pub(crate) fn destroy_qp(&mut self, id: QpId) -> Result<(), VerbsError> {
        self.nic.transmit(Instant::now());
        self.nic.destroy_qp(id)?;
        self.qps.remove(&id);
        self.targets.retain(|_, target| *target != id);
        Ok(())
    }

    /// Ends the queues of a context that is closed, as the kernel does. Returns whether the program
    /// still has objects of it.
    pub(crate) fn end_queues(&mut self, context: u64) -> bool {
        let mut has_qps = false;
        self.nic.transmit(Instant::now());
        self.qps.retain(|id, users| {
            let before = users.len();
            users.retain(|qp| !qp.is_of(context));
            has_qps |= users.len() < before;
            if users.is_empty() {
                self.targets.retain(|_, target| target != id);
                // One that is attached to a group stays, and reports nothing.
                let _ = self.nic.destroy_qp(*id);
            }
            !users.is_empty()
        });
        let srqs = self.srqs.extract_if(|_, srq| srq.is_of(context));
        let srqs: Vec<SrqId> = srqs.map(|(id, _)| id).collect();
        for &id in &srqs {
            let _ = self.nic.destroy_srq(id);
        }
        let has_cqs = self.cqs.values().any(|cq| cq.is_of(context));
        has_cqs || has_qps || !srqs.is_empty()
    }

    /// Every descriptor of the sockets.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.nic.descriptors().chain(self.share.descriptors())
    }

    /// Reports what has happened to the program.
    fn report(&mut self) {
        while let Some(packet) = self.nic.poll_forwarded() {
            if let Some(ours) = self.share.pass_on(Instant::now(), packet) {
                self.nic.handle_forwarded(Instant::now(), &ours);
            }
        }
        while let Some(id) = self.nic.poll_cq_event() {
            if self.cqs.get(&id).is_some_and(|cq| cq.fire()) {
                self.armed -= 1;
            }
        }
        while let Some(event) = self.nic.poll_async_event() {
            if event == AsyncEvent::DeviceFatal {
                self.end();
            }
            self.report_async(event);
        }
        if let Some(administration) = &mut self.administration {
            administration.progress(&mut self.nic);
        }
        if let Some(on_cm_event) = self.on_cm_event {
            while let Some(event) = self.nic.poll_cm_event() {
                on_cm_event(self, event);
            }
        }
    }

    /// Gives the address up for a device that was removed.
    fn end(&mut self) {
        let ids: Vec<CmId> = self.ports.keys().copied().collect();
        for id in ids {
            self.give_back_port(id);
        }
        self.share.leave();
        self.is_removed.store(true, Ordering::Release);
    }

    fn report_async(&self, event: AsyncEvent) {
        match event {
            AsyncEvent::CqError(id) => {
                if let Some(cq) = self.cqs.get(&id) {
                    cq.report(event);
                }
            }
            AsyncEvent::QpFatal(id)
            | AsyncEvent::QpReqError(id)
            | AsyncEvent::QpAccessError(id)
            | AsyncEvent::CommEstablished(id)
            | AsyncEvent::SqDrained(id)
            | AsyncEvent::PathMig(id)
            | AsyncEvent::PathMigError(id)
            | AsyncEvent::QpLastWqeReached(id) => {
                for qp in self.qps.get(&id).into_iter().flatten() {
                    qp.report(event);
                }
            }
            AsyncEvent::SrqLimitReached(id) => {
                if let Some(srq) = self.srqs.get(&id) {
                    srq.report(event);
                }
            }
            AsyncEvent::PortActive(_)
            | AsyncEvent::PortError(_)
            | AsyncEvent::GidChange(_)
            | AsyncEvent::DeviceFatal => {
                for context in self.contexts.values() {
                    context.report(event);
                }
            }
        }
    }
}
