//! A NIC, its lock and its thread.
//!
//! All contexts of a device in a process share one [`Engine`]. A call of the program acquires the
//! lock, does its work, and drives the NIC if it may have to wait for something, so a program that
//! polls does not need another thread. The NIC is driven by:
//!
//! - An application thread that polls a completion queue. The engine's thread only checks every
//!   [`TICK`] that polling continues. It keeps watching the socket if only other calls are used,
//!   because they send but do not receive.
//! - The engine's thread, if no call drives the NIC. It sleeps until a packet arrives or a timer
//!   expires. The next call that drives the NIC wakes it once, because that call may have started
//!   an earlier timer.
//! - A call that waits for a notification ([`Engine::drive_until`]). It replaces the engine's
//!   thread, so that a packet wakes the program directly.
//!
//! Some special cases:
//!
//! - A program may wait for a peer's WRITE by polling its memory. If packets arrive while no call
//!   drives the NIC, calls leave the socket armed, so that the next packet wakes the thread
//!   immediately, until the program polls for completions again.
//! - A program that has armed a completion queue is about to sleep. Its next poll that finds no
//!   completions arms the socket, so that a packet wakes the thread immediately.
//! - The thread also handles incoming packets from the broker of the address (`broker`).
//! - If its interface disappears, or the broker is killed, a device is removed: its thread exits,
//!   and a call that opens the device later creates a new engine.

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

use riser_transport::nic::NicLimits;
use riser_transport::nic::rdma_cm::port_space;
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
use crate::broker::share::{Share, in_use};
use crate::broker::{BITS, Port};
use crate::cancel::{self, Cleanup, Uncancellable, step};
use crate::command::Family;
use crate::driver::{Activity, Driver, TICK};
use crate::errno::Errno;
use crate::lock::unpoisoned;

/// Number of polls with completions after which the thread no longer expects packets that are not
/// received by polling.
const EAGER: u32 = 64;

/// Posts within this time are sent together.
const BURST: Duration = Duration::from_micros(10);

/// Maximum number of consecutive rounds of the NIC under the lock, so that calls can acquire the
/// lock in between.
const ROUNDS: usize = 16;

/// Maximum time to wait for other processes that open the same address.
const OPENING: Duration = Duration::from_secs(30);

/// Maximum number of descriptors to wait for.
const MAX_INPUTS: usize = 8;

/// Maximum number of consecutive packets from the broker, for the same reason.
const PACKETS: usize = 64;

/// Configuration of a device, based on the environment.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    pub(crate) name: String,
    pub(crate) addr: IpAddr,
    /// Additional addresses for paths of connections.
    pub(crate) other_addrs: Vec<IpAddr>,
    /// Address of the fabric's subnet administrator, if any.
    pub(crate) administrator: Option<IpAddr>,
    pub(crate) faults: RoceFaults,
    /// File for captured packets, without the process ID that is appended to it.
    pub(crate) capture: Option<PathBuf>,
}

impl Config {
    /// Returns all addresses, in the order of the GID table.
    pub(crate) fn addrs(&self) -> impl Iterator<Item = IpAddr> {
        iter::once(self.addr).chain(self.other_addrs.iter().copied())
    }

    /// Returns the file for captured packets of this process. A forked process uses a different
    /// file.
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
    /// Wakes a call that drives the NIC. The thread and the call need separate descriptors, because
    /// reading a shared one would prevent the other from being woken.
    wake_call: OwnedFd,
    /// Descriptors that become readable when the NIC receives something. These are numbers, not
    /// duplicates, because a forked process would keep duplicates open.
    inputs: Vec<RawFd>,
    /// Set if it belongs to a parent process, and its sockets can't be used.
    is_inherited: AtomicBool,
    /// Set if the device was removed. Same as in the state, but without the lock.
    is_removed: Arc<AtomicBool>,
}

/// An object of the program that can have asynchronous events.
pub(crate) trait Reports: Send {
    fn report(&self, event: AsyncEvent);

    /// Returns the address of the program's structure.
    fn address(&self) -> usize;

    /// Returns whether it belongs to the context with this number.
    fn is_of(&self, context: u64) -> bool;
}

/// A completion queue of the program.
pub(crate) trait Fires: Reports {
    /// Notifies the program. Returns whether it was waiting for the notification.
    fn fire(&self) -> bool;
}

/// Name of an XRC domain: device and inode of its file.
pub(crate) type File = (u64, u64);

/// State protected by the lock.
pub(crate) struct State {
    pub(crate) nic: Roce,
    /// Objects of the program by handle of the NIC.
    pub(crate) cqs: HashMap<CqId, Box<dyn Fires>>,
    /// A shared queue pair has several objects.
    pub(crate) qps: HashMap<QpId, Vec<Box<dyn Reports>>>,
    /// Queue pairs that can be opened, by domain and number.
    pub(crate) targets: HashMap<(XrcdId, u32), QpId>,
    /// XRC domains with a file, and how often they are open.
    pub(crate) xrc_domains: Vec<(File, XrcdId, u32)>,
    /// Protection domains, with the contexts that can import them.
    pub(crate) pds: HashMap<PdId, Family>,
    pub(crate) srqs: HashMap<SrqId, Box<dyn Reports>>,
    /// Contexts by number.
    pub(crate) contexts: HashMap<u64, Box<dyn Reports>>,
    /// Handler for events of the connection manager, once it is used.
    pub(crate) on_cm_event: Option<fn(&mut State, CmEvent)>,
    /// Requests to administrators from programs that use libibumad, once there were any.
    pub(crate) administration: Option<Administration>,
    administrator: Option<IpAddr>,
    share: Share,
    /// Ports of identifiers and whether they are listening, and the number of identifiers for each
    /// port.
    ports: HashMap<CmId, (Port, bool)>,
    port_users: HashMap<Port, u32>,
    /// Completions to be returned to the program.
    completions: Vec<Completion>,
    timed: Vec<TimedCompletion>,
    /// Number of completion queues that were armed by a program and have not fired yet.
    armed: usize,
    /// Number of polls that must find completions before we stop keeping the socket armed, because
    /// packets have arrived while no call was driving the NIC.
    eager: u32,
    /// Time when posts were last sent.
    sent_at: Instant,
    driver: Driver,
    is_removed: Arc<AtomicBool>,
}

/// The locked engine. When it is dropped, pending events are reported to the program.
pub(crate) struct Locked<'a> {
    state: MutexGuard<'a, State>,
    engine: &'a Engine,
    /// Dropped after the lock is released.
    _uncancellable: Uncancellable,
}

/// Engines by device name.
pub(crate) type Engines = Vec<(String, Arc<Engine>)>;

/// The engines of this process. They are kept when their last context is closed, because programs
/// open a device repeatedly, and because all sockets of the process must be known when it forks.
pub(crate) static ENGINES: Mutex<Engines> = Mutex::new(Vec::new());

impl Engine {
    /// Returns the engine of a device, and opens it if this process has not opened it yet. This
    /// might take some time if its broker is not running yet.
    ///
    /// # Errors
    /// Returns `EADDRINUSE` if another process does not finish opening the address, and errors of
    /// [`Share::open`], [`Roce::open_shared`], and of starting a thread.
    pub(crate) fn open(config: &Config) -> io::Result<Arc<Self>> {
        let _uncancellable = Uncancellable::new();
        let until = Instant::now() + OPENING;
        let (mut engines, (share, socket)) = loop {
            let mut engines = unpoisoned(ENGINES.lock());
            engines.retain(|(_, engine)| !engine.is_removed());
            if let Some((_, engine)) = engines.iter().find(|(name, _)| *name == config.name) {
                return Ok(Arc::clone(engine));
            }
            if let Some(opened) = Share::open(config.addr)? {
                break (engines, opened);
            }
            // A thread that forks waits for the lock, so we must not hold it while we wait.
            drop(engines);
            if Instant::now() > until {
                return Err(in_use(
                    "another process is opening it and does not finish; it may be stopped",
                ));
            }
            thread::sleep(TICK);
        };
        let config_of_nic = RoceConfig {
            other_addrs: config.other_addrs.clone(),
            worker_index: share.slot(),
            worker_bits: BITS,
            requests: Requests::ToFirst,
            is_removable: true,
            limits: limits(),
            faults: config.faults,
            capture: config.capture_file(),
            ..RoceConfig::new(config.addr)
        };
        let mut nic = open_nic(config, &config_of_nic, &socket)?;
        nic.watch_connections();
        // The same text as set by rdma-ndd on Linux, which is limited to 64 bytes.
        let host = rustix::system::uname();
        let text = format!("{} {}", host.nodename().to_string_lossy(), config.name);
        let text: String = text.chars().filter(char::is_ascii).take(64).collect();
        nic.modify_device(&text).map_err(io::Error::other)?;
        let inputs = nic.event_fds().into_iter().chain(share.connection());
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
                driver: Driver::new(),
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

    /// Acquires the lock.
    pub(crate) fn lock(&self) -> Locked<'_> {
        let uncancellable = Uncancellable::new();
        let state = unpoisoned(self.state.lock());
        Locked {
            state,
            engine: self,
            _uncancellable: uncancellable,
        }
    }

    /// Returns the lock itself, for `fork`.
    pub(crate) fn state(&self) -> &Mutex<State> {
        &self.state
    }

    /// Marks the engine as belonging to the parent of this process.
    pub(crate) fn inherit(&self) {
        self.is_inherited.store(true, Ordering::Release);
    }

    /// Returns whether it belongs to a parent process.
    pub(crate) fn is_inherited(&self) -> bool {
        self.is_inherited.load(Ordering::Acquire)
    }

    /// Returns whether the device was removed. In this case, its objects fail, and a new instance
    /// can be opened.
    pub(crate) fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Acquire)
    }

    /// Returns the descriptors that wake threads.
    pub(crate) fn wake_fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.wake.as_fd(), self.wake_call.as_fd()]
    }

    /// Wakes the thread, or the call that drives the NIC instead.
    fn wake(&self, is_call: bool) {
        let fd = if is_call { &self.wake_call } else { &self.wake };
        let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
    }

    /// Drives the NIC instead of the thread until an event queue has an event, for a call that
    /// waits for it. Returns early if another call already does this, or on a signal, and returns
    /// true in the latter case.
    ///
    /// The thread may be cancelled while it sleeps. In this case, the engine's thread becomes the
    /// driver again.
    ///
    /// # Safety
    /// The descriptor must be open. No frame up to the program's may have anything to drop.
    pub(crate) unsafe fn drive_until(&'static self, events: RawFd) -> bool {
        if !step(|| self.begin_driving()) {
            return false;
        }
        let cleanup = Cleanup {
            routine: stop_driving,
            argument: ptr::from_ref(self).cast_mut().cast(),
        };
        let mut woken = WakeReasons::default();
        while !woken.has_events && !woken.is_interrupted {
            let mut sleep = step(|| {
                let timeout = self.lock().take_turn(woken.has_input);
                self.plan_sleep(timeout, Some(events))
            });
            // SAFETY: guaranteed by the caller.
            let ready = unsafe { sleep.wait(Some(cleanup)) };
            woken = step(|| self.end_sleep(&sleep, ready));
        }
        step(|| self.end_driving());
        woken.is_interrupted
    }

    /// Makes a waiting call the driver of the NIC, unless another call already is, or the engine
    /// belongs to a parent process.
    fn begin_driving(&self) -> bool {
        if self.is_inherited() {
            return false;
        }
        let Some(wakes_thread) = self.lock().driver.begin_call() else {
            return false;
        };
        if wakes_thread {
            self.wake(false);
        }
        true
    }

    /// Makes the thread the driver again.
    fn end_driving(&self) {
        // The thread will check this within a tick, unless it is sleeping until it is woken.
        if self.lock().driver.end_call() {
            self.wake(false);
        }
    }

    /// Prepares to sleep until the NIC or an event queue is ready, or the timeout expires.
    fn plan_sleep(&self, timeout: Option<Duration>, events: Option<RawFd>) -> Sleep {
        // The descriptors of a removed device are closed.
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

    /// Evaluates the return value of a sleep.
    fn end_sleep(&self, sleep: &Sleep, ready: c_int) -> WakeReasons {
        let is_interrupted = ready == -libc::EINTR;
        if ready < 0 {
            if !is_interrupted {
                let error = io::Error::from_raw_os_error(-ready);
                error!(%error, "cannot wait in the device's thread");
                thread::sleep(TICK);
            }
            return WakeReasons {
                is_interrupted,
                ..WakeReasons::default()
            };
        }
        let is_ready = |fd: &libc::pollfd| fd.fd >= 0 && fd.revents != 0;
        let (inputs, others) = sleep.fds.split_at(sleep.inputs);
        if is_ready(&others[0]) {
            // SAFETY: the engine owns the descriptor.
            let wake = unsafe { BorrowedFd::borrow_raw(others[0].fd) };
            let _ = rustix::io::read(wake, &mut [0; 8]);
        }
        WakeReasons {
            has_input: inputs.iter().any(is_ready),
            has_events: sleep.has_events && is_ready(&others[1]),
            is_interrupted,
        }
    }
}

/// Cleanup for a call that is cancelled while it drives the NIC of an engine.
extern "C" fn stop_driving(engine: *mut c_void) {
    // SAFETY: this is the argument of `Engine::drive_until`, whose engine is never freed.
    unsafe { &*engine.cast::<Engine>() }.end_driving();
}

/// Descriptors and timeout of a sleep. This is plain data, because a cancelled thread must not have
/// anything to drop.
struct Sleep {
    /// Inputs of the NIC, the descriptor that wakes the sleeping thread, and the event queue, if
    /// any.
    fds: [libc::pollfd; MAX_INPUTS],
    inputs: usize,
    has_events: bool,
    timeout: Option<libc::timespec>,
}

impl Sleep {
    /// # Safety
    /// Same as for [`cancel::wait`].
    unsafe fn wait(&mut self, cleanup: Option<Cleanup>) -> c_int {
        let count = self.inputs + 1 + usize::from(self.has_events);
        // SAFETY: guaranteed by the caller.
        unsafe { cancel::wait(&mut self.fds[..count], self.timeout, cleanup) }
    }
}

/// Opens a NIC with the socket of this process's slot. Only the first address is shared: if another
/// process uses the additional addresses, the NIC is opened without them.
///
/// # Errors
/// Returns errors of [`Roce::open_shared`].
fn open_nic(device: &Config, config: &RoceConfig, socket: &OwnedFd) -> io::Result<Roce> {
    Roce::open_shared(config, socket.try_clone()?).or_else(|error| {
        if error.kind() != io::ErrorKind::AddrInUse || config.other_addrs.is_empty() {
            return Err(error);
        }
        warn!(
            "opened {} with only its first address {}: its further \
             addresses can be used by one process at a time: \
             {error} (`ss -aunp 'sport = {ROCE_PORT}'` lists processes)",
            device.name, device.addr
        );
        let config = RoceConfig {
            other_addrs: Vec::new(),
            ..config.clone()
        };
        Roce::open_shared(&config, socket.try_clone()?)
    })
}

/// Reasons for waking up, other than a timeout.
#[derive(Clone, Copy, Default)]
struct WakeReasons {
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

/// Maximum time to wait for a device's lock when the process exits.
const FLUSH: Duration = Duration::from_millis(100);

/// Sends pending packets when the process exits. This includes acknowledgements for a peer's last
/// messages, which an adapter would have sent by now, and disconnects, which the kernel would send.
/// The last packets are also captured.
extern "C" fn flush() {
    let Ok(engines) = ENGINES.try_lock() else {
        return;
    };
    for (_, engine) in engines.iter() {
        let until = Instant::now() + FLUSH;
        // With a timeout, because a thread that has exited during a call may still hold the lock.
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
            state.report_connections();
            state.nic.flush_capture();
        }
    }
}

/// Returns the limits of a device. It is used by a single program, which can use as much of its own
/// memory as it likes.
fn limits() -> NicLimits {
    NicLimits {
        // Libraries create queues that are large enough for more peers than they will ever have.
        // Unused entries don't need memory.
        max_cqe: 1 << 22,
        max_ah: 1 << 16,
        max_qps_per_peer: u32::MAX,
        ..NicLimits::default()
    }
}

/// Entry point of the thread, which drives the NIC while no call does.
fn run(engine: &Engine) {
    let mut has_input = false;
    loop {
        let mut locked = engine.lock();
        let timeout = match locked.driver.check_call() {
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
        // If a program is killed, at most the last tick is missing from its capture.
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
    /// Runs one turn of the driver, which is the thread or a waiting call. Returns how long it may
    /// sleep, or `None` for no timeout.
    fn take_turn(&mut self, has_input: bool) -> Option<Duration> {
        let state = &mut *self.state;
        let now = Instant::now();
        let activity = state.driver.take_activity();
        let is_driven = activity > Activity::Idle;
        let is_polled = activity == Activity::Polled;
        let has_input = has_input || state.share.has_packets();
        if is_polled && !has_input && state.eager == 0 && state.armed == 0 {
            // Posts that were waiting for the next poll are sent now.
            state.nic.transmit(now);
            state.driver.set_asleep(false);
            return Some(TICK);
        }
        let rounds = state.receive_elsewhere() + state.drive();
        state.eager = match (rounds > 0, is_driven) {
            // The NIC is idle, so no transfer depends on the thread.
            (false, false) => 0,
            (false, true) => state.eager,
            (true, _) => EAGER,
        };
        state.report();
        if rounds >= ROUNDS || state.nic.arm_fds() {
            return Some(Duration::ZERO);
        }
        if state.eager > 0 || is_driven {
            state.driver.set_asleep(false);
            return Some(TICK);
        }
        state.driver.set_asleep(true);
        let query_deadline = state.administration.as_ref();
        let query_deadline = query_deadline.and_then(Administration::deadline);
        let deadlines = [state.nic.deadline(), query_deadline];
        let deadline = deadlines.into_iter().flatten().min()?;
        Some(deadline.saturating_duration_since(Instant::now()))
    }

    /// Sends packets that must be sent before the program continues.
    pub(crate) fn transmit(&mut self) {
        let now = Instant::now();
        self.state.nic.transmit(now);
        self.state.sent_at = now;
        self.state.driver.note(Activity::Sent);
    }

    /// Sends the packets of a posting call. If posts follow each other quickly, they are sent
    /// together by the next poll, or the next time the thread checks.
    pub(crate) fn transmit_soon(&mut self) {
        if self.state.armed == 0 && self.state.sent_at.elapsed() < BURST {
            self.state.driver.note(Activity::Sent);
        } else {
            self.transmit();
        }
    }

    /// Polls up to `max` completions. If the queue is empty, drives the NIC and tries again.
    ///
    /// # Errors
    /// Returns errors of [`Verbs::poll_cq`].
    pub(crate) fn poll_cq(&mut self, cq: CqId, max: usize) -> Result<&[Completion], VerbsError> {
        self.poll(|state| {
            state.completions.clear();
            state.nic.poll_cq(cq, max, &mut state.completions)
        })?;
        Ok(&self.state.completions)
    }

    /// Polls a single completion with its timestamp, from a queue that supports timestamps, like
    /// [`Locked::poll_cq`].
    ///
    /// # Errors
    /// Returns errors of [`Verbs::poll_cq_timed`].
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
            state.driver.note(Activity::Polled);
            taken = take(state)?;
            if taken == 0 && state.armed > 0 && state.nic.arm_fds() {
                // The thread should check immediately instead of waiting for the descriptor.
                self.engine.wake(state.driver.is_call());
            }
        }
        if taken > 0 {
            state.eager = state.eager.saturating_sub(1);
        }
        Ok(())
    }

    /// Counts a completion queue that was armed by the program. Packets must wake the thread now.
    pub(crate) fn arm(&mut self, is_first: bool) {
        if is_first {
            self.state.armed += 1;
        }
        self.transmit();
        if self.state.nic.arm_fds() {
            self.engine.wake(self.state.driver.is_call());
        }
    }

    /// Removes an armed completion queue from the count.
    pub(crate) fn disarm(&mut self) {
        self.state.armed -= 1;
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let state = &mut *self.state;
        state.report();
        let has_packets = state.share.has_packets();
        if state.driver.activity() == Activity::Idle && !has_packets {
            return;
        }
        let must_look = has_packets || state.eager > 0 && state.nic.arm_fds();
        if must_look || state.driver.is_asleep() {
            state.driver.set_asleep(false);
            self.engine.wake(state.driver.is_call());
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
    /// Receives packets from the broker. Returns the number of rounds of the NIC.
    ///
    /// Packets that were received by the NIC's own socket earlier are processed first, because a
    /// peer that confirms a connection and immediately requests another one sends to both sockets,
    /// and programs expect the events in this order.
    fn receive_elsewhere(&mut self) -> usize {
        let mut rounds = 0;
        for _ in 0..PACKETS {
            if rounds >= ROUNDS {
                break;
            }
            match self.share.poll_packet() {
                Ok(Some(packet)) => {
                    rounds += self.drive();
                    self.nic.handle_forwarded(Instant::now(), &packet);
                }
                Ok(None) => break,
                Err(_) => {
                    let addr = self.nic.socket_addr().ip();
                    error!(%addr, "the broker of the address has exited");
                    self.nic.remove();
                    break;
                }
            }
        }
        rounds
    }

    /// Drives the NIC until it has nothing to do, or until the maximum number of rounds. Returns
    /// the number of rounds.
    fn drive(&mut self) -> usize {
        let mut rounds = 0;
        while self.nic.progress(Instant::now()) > 0 && rounds < ROUNDS {
            rounds += 1;
        }
        rounds
    }

    /// Calls a function with the administration requests, which are created on first use.
    ///
    /// # Errors
    /// Returns errors of [`Verbs::query_port`].
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

    /// Allocates a port of the RDMA CM for an identifier, or any free port if `port` is 0. Returns
    /// the port. If the identifier already has a port, it is not changed.
    ///
    /// # Errors
    /// Returns errors of [`Share::take_port`].
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

    /// Listens with an identifier, and on its port, if any.
    ///
    /// # Errors
    /// Returns errors of [`RdmaCm::listen`] and [`Share::listen`].
    pub(crate) fn listen(&mut self, id: CmId, backlog: u32) -> Result<(), Errno> {
        self.nic.listen(id, backlog)?;
        if let Some((port, listens)) = self.ports.get_mut(&id) {
            *listens = true;
            self.share.listen(*port)?;
        }
        Ok(())
    }

    /// Releases the port of an identifier, if any.
    pub(crate) fn release_port(&mut self, id: CmId) {
        let Some((port, listened)) = self.ports.remove(&id) else {
            return;
        };
        // Other identifiers that use this port may not be listening.
        if listened && !self.ports.values().any(|other| *other == (port, true)) {
            self.share.stop_listening(port);
        }
        if let Some(users) = self.port_users.get_mut(&port) {
            *users -= 1;
            if *users == 0 {
                self.port_users.remove(&port);
                self.share.release_port(port);
            }
        }
    }

    /// Forgets all ports without releasing them, because they belong to another process.
    pub(crate) fn forget_ports(&mut self) {
        self.ports.clear();
        self.port_users.clear();
    }

    /// Removes a structure of a queue pair, identified by its address. Returns whether the queue
    /// pair has no other structures and should be destroyed.
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

    /// Destroys a queue pair. Posted requests are sent first, for example datagrams whose
    /// completions were not polled, because an adapter would already have sent them.
    ///
    /// # Errors
    /// Returns errors of [`Verbs::destroy_qp`].
    pub(crate) fn destroy_qp(&mut self, id: QpId) -> Result<(), VerbsError> {
        self.nic.transmit(Instant::now());
        self.nic.destroy_qp(id)?;
        self.qps.remove(&id);
        self.targets.retain(|_, target| *target != id);
        Ok(())
    }

    /// Destroys the queues of a closed context, like the kernel does. Returns whether the program
    /// still has objects of the context.
    pub(crate) fn end_queues(&mut self, context: u64) -> bool {
        let mut has_qps = false;
        self.nic.transmit(Instant::now());
        self.qps.retain(|id, users| {
            let before = users.len();
            users.retain(|qp| !qp.is_of(context));
            has_qps |= users.len() < before;
            if users.is_empty() {
                self.targets.retain(|_, target| target != id);
                // If it is attached to a group, this fails, but it no longer reports events.
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

    /// Returns all descriptors of the sockets.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.nic.descriptors().chain(self.share.connection())
    }

    /// Reports pending events to the program.
    fn report(&mut self) {
        while let Some(packet) = self.nic.poll_forwarded() {
            self.share.pass_on(packet);
        }
        self.report_connections();
        while let Some(id) = self.nic.poll_cq_event() {
            if self.cqs.get(&id).is_some_and(|cq| cq.fire()) {
                self.armed -= 1;
            }
        }
        while let Some(event) = self.nic.poll_async_event() {
            if event == AsyncEvent::DeviceFatal {
                self.release_address();
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

    /// Reports established and closed connections to the broker.
    fn report_connections(&mut self) {
        while let Some((id, dreq)) = self.nic.poll_connection() {
            self.share.note_connection(id, dreq);
        }
    }

    /// Releases the address of a removed device.
    fn release_address(&mut self) {
        self.forget_ports();
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
