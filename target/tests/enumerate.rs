//! Fails each operation on a worker's ring once, each completion of its RDMA device, each
//! allocating call to this device, and each memory mapping.
//!
//! The same commands are repeated, and each time the operation with another number fails. The
//! affected command must return the correct sense data, or its connection is closed, or its login
//! is rejected because of missing resources; the initiator then retries it. All other commands must
//! complete normally, all data must be the same as in a run without failures, and in the end the
//! target must not have any remaining sessions, buffers or device objects.
//!
//! We don't test failures of heap allocations, because Rust aborts the process in this case, which
//! is covered as a crash (`tests/tests/crash`).

#![allow(clippy::print_stdout, reason = "prints results")]

mod simulation;
mod world;

use std::cell::RefCell;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::mpsc::channel;
use std::time::Duration;

use riser_reactor::Op;
use riser_reactor::simulated::Operation;
use riser_scsi::iscsi::pdu::FromTarget;
use riser_scsi::srp::{DataBuffer, TargetPortId};
use riser_target::worker::WorkerError;
use riser_target::worker::mail::{Mail, Snapshot};
use riser_test_peers::iser_client::Client as Iser;
use riser_test_peers::mini::{Mini, login_req};
use riser_test_peers::pdus::{cdb10, pattern};
use riser_test_peers::tcp::Client;
use riser_transport::loopback::{Endpoint, Fabric, FabricConfig, Failing, Record};
use riser_transport::nic::NicUsage;
use riser_transport::verbs::{WcOpcode, WcStatus};
use simulation::{IQN, Simulation, Wire, footprint};
use world::SERVER;

const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;
const UNIT_ATTENTION: u8 = 6;
const MISCOMPARE: u8 = 0xe;
const COMPARE_AND_WRITE: u8 = 0x89;
const VERIFY: u8 = 0x2f;

/// Maximum number of attempts per command: one fails, and one may report a unit attention after
/// another login.
const ATTEMPTS: usize = 4;

/// The failure in a run.
#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    /// The ring operation with this number fails, with one of its errors.
    Operation(usize, usize),
    /// A call or a completion of the device fails.
    Device(Failing),
    /// The memory mapping with this number fails.
    Mapping(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Iscsi,
    Srp,
    Iser,
}

struct Command {
    cdb: Vec<u8>,
    out: Vec<u8>,
    /// Number of bytes to read.
    len: u32,
}

/// Status, with data or sense data.
type CommandResult = (u8, Vec<u8>);

/// The result of a run.
#[derive(Debug, Default)]
struct Report {
    /// Data returned by each command.
    data: Vec<Vec<u8>>,
    /// Operation code, sense key, ASC and ASCQ of failed commands.
    failures: Vec<(u8, [u8; 3])>,
    /// Number of connections that were closed unexpectedly.
    lost: usize,
    failed: Option<(Operation, i32)>,
    operations: usize,
    mappings: usize,
    /// Calls and completions of the device.
    record: Record,
    /// Error messages of rejected peers.
    errors: Vec<String>,
    /// Reasons for rejected logins, as counted by the worker.
    refusals: Vec<(&'static str, u64)>,
    /// Remaining objects of the device.
    objects: Option<NicUsage>,
}

/// Returns commands that use all kinds of disk operations, some of them in multiple pieces.
fn commands() -> Vec<Command> {
    let command = |cdb: &[u8], out: Vec<u8>, len| Command {
        cdb: cdb.to_vec(),
        out,
        len,
    };
    let with_flags = |opcode, flags, lba, blocks| {
        let mut cdb = cdb10(opcode, lba, blocks);
        cdb[1] = flags;
        cdb
    };
    let (first, second) = (pattern(8192, 7), pattern(4096, 9));
    let mut unmap = vec![0; 24];
    (unmap[1], unmap[3], unmap[15], unmap[19]) = (22, 16, 16, 8);
    let mut write_same = [0; 16];
    (write_same[0], write_same[9], write_same[13]) = (0x93, 200, 4);
    let mut swap = [0; 16];
    (swap[0], swap[9], swap[13]) = (COMPARE_AND_WRITE, 64, 1);
    let mut status = [0; 16];
    (status[0], status[1], status[13]) = (0x9e, 0x12, 24);
    vec![
        command(&cdb10(0x2a, 8, 16), first.clone(), 0),
        command(&cdb10(0x28, 8, 16), Vec::new(), 8192),
        command(&cdb10(0x35, 0, 0), Vec::new(), 0),
        // With FUA.
        command(&with_flags(0x2a, 8, 64, 8), second.clone(), 0),
        command(&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], unmap, 0),
        command(&write_same, pattern(512, 3), 0),
        command(&swap, [&second[..512], &pattern(512, 5)[..]].concat(), 0),
        // BYTCHK.
        command(&with_flags(VERIFY, 2, 8, 8), first[..4096].to_vec(), 0),
        command(&status, Vec::new(), 24),
        command(&cdb10(0x35, 0, 0), Vec::new(), 0),
        command(&cdb10(0x28, 0, 256), Vec::new(), 131_072),
    ]
}

/// Returns the possible errors of an operation, as reported by a kernel.
fn errors(op: Op) -> &'static [i32] {
    match op {
        Op::Accept => &[libc::EMFILE, libc::ECONNABORTED],
        Op::Send | Op::Receive(_) => &[libc::ECONNRESET, libc::ENOMEM],
        Op::Poll { .. } => &[libc::ENOMEM],
        Op::Read { .. } => &[libc::EIO, libc::ENOMEM],
        Op::Write { .. } | Op::Sync(_) | Op::Fallocate { .. } => {
            &[libc::EIO, libc::ENOSPC, libc::ENOMEM]
        }
    }
}

/// Returns the expected sense data after an operation has failed (SPC-4 and SBC-3): key, ASC and
/// ASCQ.
fn sense_of(opcode: u8, op: Op, errno: i32) -> [u8; 3] {
    match (errno, op) {
        (libc::EIO, Op::Read { .. }) => [3, 0x11, 0],
        // VERIFY checks the medium, so it first writes the cached data, and then cannot read.
        (libc::EIO, Op::Sync(_)) if opcode == VERIFY => [3, 0x11, 0],
        (libc::EIO, _) => [3, 0x0c, 0],
        (libc::ENOSPC, _) => [7, 0x27, 7],
        (libc::ENOMEM, _) => [0xb, 0, 0],
        _ => panic!("{op:?} does not fail with {errno}"),
    }
}

/// An initiator that reconnects if it loses its connection.
struct Initiator {
    simulation: Rc<RefCell<Simulation>>,
    protocol: Protocol,
    target: TargetPortId,
    connections: u8,
    /// Reasons reported for rejected logins.
    errors: Vec<String>,
    tcp: Option<Client<Wire>>,
    srp: Option<Mini<Endpoint>>,
    iser: Option<Iser<Endpoint>>,
}

impl Initiator {
    fn new(simulation: &Rc<RefCell<Simulation>>, protocol: Protocol) -> Self {
        let catalog = simulation.borrow().world.shared.registry.catalog();
        Self {
            simulation: Rc::clone(simulation),
            protocol,
            target: catalog.targets[0].portals[0].target_port(),
            connections: 0,
            errors: Vec::new(),
            tcp: None,
            srp: None,
            iser: None,
        }
    }

    /// Runs a function with the connection. Returns `None` if the connection was closed, which
    /// clients report with a panic. A panic of the worker is forwarded.
    fn attempt<T>(&mut self, run: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(|| run(self))) {
            Ok(Some(done)) => return Some(done),
            Err(panic) if self.simulation.borrow().is_working => resume_unwind(panic),
            Ok(None) | Err(_) => {}
        }
        (self.tcp, self.srp, self.iser) = (None, None, None);
        None
    }

    fn is_connected(&self) -> bool {
        self.tcp.is_some() || self.srp.is_some() || self.iser.is_some()
    }

    fn connect(&mut self) -> Option<()> {
        if self.is_connected() {
            return Some(());
        }
        self.connections += 1;
        let number = self.connections;
        let simulation = Rc::clone(&self.simulation);
        match self.protocol {
            Protocol::Iscsi => {
                let (peer, idle) = {
                    let one = simulation.borrow();
                    let from = SocketAddr::from(([10, 0, 0, 150], 40_000 + u16::from(number)));
                    (one.listener.connect(from)?, one.world.client(50 + number))
                };
                let wire = Wire {
                    simulation,
                    peer,
                    idle,
                    received: Rc::default(),
                };
                self.tcp = Client::login_on(wire, IQN, 1).ok();
            }
            Protocol::Srp => {
                let dev = simulation.borrow().world.client(number);
                let (at, request) = (SocketAddr::new(SERVER, 5555), login_req(1, self.target));
                let mut step = |dev: &mut Endpoint| simulation.borrow_mut().step(dev);
                match Mini::connect(dev, at, &request, &mut step) {
                    Ok(mini) => self.srp = Some(mini),
                    Err((_, why)) => self.errors.push(format!("{why:?}")),
                }
            }
            Protocol::Iser => {
                let dev = simulation.borrow().world.client(number);
                let at = SocketAddr::new(SERVER, 3260);
                let mut step = |dev: &mut Endpoint| simulation.borrow_mut().step(dev);
                match Iser::connect(dev, at, true, &mut step) {
                    Ok(mut iser) => {
                        iser.login(Some(IQN), 1, &[], &mut step).ok()?;
                        self.iser = Some(iser);
                    }
                    Err(why) => self.errors.push(why),
                }
            }
        }
        self.is_connected().then_some(())
    }

    fn command(&mut self, command: &Command) -> Option<CommandResult> {
        let Command { cdb, out, len } = command;
        if let Some(tcp) = &mut self.tcp {
            let moved = *len + out.len() as u32;
            tcp.send_command(cdb, !out.is_empty(), moved, out);
            let mut read = Vec::new();
            loop {
                match tcp.receive()? {
                    (FromTarget::DataIn(pdu), _, data) => {
                        read.extend(data);
                        if let Some(with) = pdu.status {
                            return Some((with.status, read));
                        }
                    }
                    (FromTarget::ScsiResponse(response), ..) if response.status == GOOD => {
                        return Some((GOOD, read));
                    }
                    // Sense data is sent after its length (RFC 7143 11.4.7.2).
                    (FromTarget::ScsiResponse(response), _, data) => {
                        return Some((response.status, data[2..].to_vec()));
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        let simulation = Rc::clone(&self.simulation);
        let mut step = |dev: &mut Endpoint| simulation.borrow_mut().step(dev);
        if let Some(iser) = &mut self.iser {
            return Some(iser.command(cdb, out, *len, &mut step));
        }
        let srp = self.srp.as_mut()?;
        srp.data.write(0, out);
        let desc = |len| match len {
            0 => DataBuffer::None,
            len => DataBuffer::Direct(srp.desc(0, len)),
        };
        let (to, from) = (desc(out.len() as u32), desc(*len));
        let reply = srp.command(cdb, to, from, &mut step);
        let mut data = vec![0; *len as usize];
        srp.data.read(0, &mut data);
        Some(match reply.status {
            GOOD => (GOOD, data),
            status => (status, reply.sense),
        })
    }

    fn leave(mut self) {
        if let Some(srp) = self.srp.take() {
            srp.disconnect(&mut |dev| self.simulation.borrow_mut().step(dev));
        }
        if let Some(iser) = self.iser.take() {
            iser.disconnect(&mut |dev| self.simulation.borrow_mut().step(dev));
        }
    }
}

/// Runs all commands with one fault, and retries each command until it's successful.
fn run(protocol: Protocol, fault: Fault) -> Report {
    let simulation = Rc::new(RefCell::new(Simulation::new(1)));
    if let Fault::Operation(index, which) = fault {
        let errno = move |op| errors(op)[which];
        simulation.borrow_mut().fails = Some((index, Box::new(errno)));
    }
    simulation.borrow_mut().mappings_left = match fault {
        Fault::Mapping(index) => index,
        _ => usize::MAX,
    };
    let failing = match fault {
        Fault::Device(failing) => Some(failing),
        _ => None,
    };
    let fabric = simulation.borrow().world.fabric.clone();
    fabric.record(SERVER, failing);
    let mut report = Report::default();
    let mut initiator = Initiator::new(&simulation, protocol);
    for command in commands() {
        let mut was_lost = false;
        let mut data = None;
        for _ in 0..ATTEMPTS {
            let response =
                initiator.attempt(|own| own.connect().and_then(|()| own.command(&command)));
            match response {
                Some((GOOD, bytes)) => data = Some(bytes),
                Some((CHECK_CONDITION, sense)) => match sense[2] & 0xf {
                    UNIT_ATTENTION => continue,
                    // The command was executed, but the response was lost.
                    MISCOMPARE if was_lost && command.cdb[0] == COMPARE_AND_WRITE => {
                        data = Some(Vec::new());
                    }
                    key => {
                        let sense = [key, sense[12], sense[13]];
                        report.failures.push((command.cdb[0], sense));
                        // Clear a failed flush, same as an administrator.
                        let catalog = simulation.borrow().world.shared.registry.catalog();
                        for store in catalog.stores.iter().flatten() {
                            let was_kept = store.clear_flush_failure().is_some();
                            let one = simulation.borrow();
                            let failed = one.failed.as_ref().map(|(operation, _)| operation.op);
                            let is_flush = matches!(failed, Some(Op::Sync(_)));
                            assert!(is_flush || !was_kept, "{fault:?}: no flush has failed");
                        }
                        continue;
                    }
                },
                Some((status, _)) => panic!("{fault:?}: status {status:#x}"),
                None => {
                    (report.lost, was_lost) = (report.lost + 1, true);
                    continue;
                }
            }
            break;
        }
        let opcode = command.cdb[0];
        report
            .data
            .push(data.unwrap_or_else(|| panic!("{fault:?}: {opcode:#x} never succeeds")));
    }
    report.errors = std::mem::take(&mut initiator.errors);
    initiator.leave();
    report.record = fabric.take_record(SERVER);
    let snapshot = check_nothing_is_left(&mut simulation.borrow_mut(), fault);
    let all = snapshot.rejects.iter();
    report.refusals = all.map(|((_, reason), count)| (reason, count)).collect();
    report.objects = snapshot.devices[0].nic.map(|nic| nic.usage);
    let one = simulation.borrow();
    report.mappings = usize::MAX - one.mappings_left;
    report.failed = one.failed.clone();
    report.operations = one.ended;
    report
}

/// Closes the sessions and checks that all resources were released.
fn check_nothing_is_left(one: &mut Simulation, fault: Fault) -> Snapshot {
    let mut idle = one.world.client(99);
    // A peer that has disappeared is only disconnected after a few seconds.
    one.pace = Duration::from_millis(1);
    for _ in 0..100_000 {
        one.step(&mut idle);
        if one.world.shared.registry.sessions() == 0 {
            break;
        }
    }
    let (sender, snapshots) = channel();
    assert!(one.world.mail.send(Mail::Snapshot(sender)).is_ok());
    let snapshot = loop {
        one.step(&mut idle);
        if let Ok(snapshot) = snapshots.try_recv() {
            break snapshot;
        }
    };
    assert_eq!(one.world.shared.registry.sessions(), 0, "{fault:?}");
    assert_eq!(snapshot.pool_free, snapshot.pool_size, "{fault:?}");
    let at_disk = one.kernel.operations();
    assert!(at_disk.iter().all(|op| op.disk().is_none()), "{fault:?}");
    snapshot
}

/// Fails all operations one by one. Returns the number of runs.
fn enumerate(protocol: Protocol) -> usize {
    let whole = run(protocol, Fault::None);
    assert!(whole.failures.is_empty() && whole.lost == 0, "{whole:?}");
    let mut runs = 0;
    for index in 0..whole.operations {
        for which in 0.. {
            let fault = Fault::Operation(index, which);
            let report = run(protocol, fault);
            let (failed, errno) = report.failed.expect("as many operations as before");
            runs += 1;
            let what = format!("{fault:?}: {:?} with error {errno}", failed.op);
            assert!(report.data == whole.data, "{what}");
            match failed.disk() {
                Some(_) => {
                    let [(opcode, sense)] = report.failures[..] else {
                        panic!("{what}: {:?}", report.failures);
                    };
                    assert_eq!(sense, sense_of(opcode, failed.op, errno), "{what}");
                    assert_eq!(report.lost, 0, "{what}");
                }
                None => {
                    assert_eq!(report.failures, [], "{what}");
                    assert!(report.lost <= 1, "{what}");
                }
            }
            if which + 1 == errors(failed.op).len() {
                break;
            }
        }
    }
    runs
}

/// Returns the possible error statuses of a completion (IBTA 11.6.2).
fn statuses(opcode: WcOpcode) -> &'static [WcStatus] {
    match opcode {
        WcOpcode::Recv | WcOpcode::RecvWriteImm => &[
            WcStatus::LocLenErr,
            WcStatus::LocProtErr,
            WcStatus::WrFlushErr,
            WcStatus::FatalErr,
        ],
        WcOpcode::RegMr | WcOpcode::BindMw | WcOpcode::LocalInv => {
            &[WcStatus::MwBindErr, WcStatus::WrFlushErr]
        }
        _ => &[
            WcStatus::LocProtErr,
            WcStatus::WrFlushErr,
            WcStatus::RemAccessErr,
            WcStatus::RemOpErr,
            WcStatus::RetryExcErr,
            WcStatus::RnrRetryExcErr,
            WcStatus::FatalErr,
        ],
    }
}

/// Checks a run with a failure of the device or a mapping. Returns whether the initiator noticed
/// this.
fn check_device(protocol: Protocol, whole: &Report, report: &Report, fault: Fault) -> bool {
    let Record { calls, completions } = &whole.record;
    let accepted = calls.iter().position(|call| *call == "accept");
    let (what, is_login) = match fault {
        Fault::Device(Failing::Call(at)) => (calls[at].to_owned(), Some(at) <= accepted),
        Fault::Device(Failing::Completion(at, _)) => (format!("{:?}", completions[at]), false),
        // If later mappings fail, the worker continues without the memory.
        _ => ("a mapping".to_owned(), report.lost > 0),
    };
    let what = format!("{fault:?}, {what} over {protocol:?}");
    assert!(report.data == whole.data, "{what}");
    assert_eq!(report.failures, [], "{what}");
    assert!(report.lost <= 1, "{what}");
    assert_eq!(report.objects, whole.objects, "{what}");
    let (counted, expected_error) = match protocol {
        Protocol::Srp => ("insufficient_resources", "Login(InsufficientResources)"),
        Protocol::Iser => ("out_of_resources", "Rejected"),
        Protocol::Iscsi => ("out_of_resources", ""),
    };
    let expected = if is_login { vec![(counted, 1)] } else { vec![] };
    assert_eq!(report.refusals, expected, "{what}");
    let errors_match = report
        .errors
        .iter()
        .all(|words| words.contains(expected_error));
    let is_reported = is_login && protocol != Protocol::Iscsi;
    assert_eq!(
        (report.errors.len(), errors_match),
        (is_reported.into(), true),
        "{what}: {:?}",
        report.errors
    );
    report.lost == 1
}

/// Fails all completions, calls and mappings one by one. Returns the number of runs.
fn enumerate_device(protocol: Protocol) -> usize {
    let whole = run(protocol, Fault::None);
    let Record { calls, completions } = &whole.record;
    let completions = completions.iter().enumerate().flat_map(|(at, opcode)| {
        let fails = move |status: &WcStatus| Fault::Device(Failing::Completion(at, *status));
        statuses(*opcode).iter().map(fails)
    });
    let calls = (0..calls.len()).map(|at| Fault::Device(Failing::Call(at)));
    let mappings = (0..whole.mappings).map(Fault::Mapping);
    let (mut runs, mut noticed) = (0, 0);
    for fault in completions.chain(calls).chain(mappings) {
        let report = run(protocol, fault);
        noticed += usize::from(check_device(protocol, &whole, &report, fault));
        runs += 1;
    }
    // A failure can only be unnoticed at the end of a session.
    assert!(runs - noticed <= 11, "{noticed} of {runs} were noticed");
    runs
}

/// If a worker can't get memory when it's started, it must either fail or report the parts that it
/// doesn't serve. When memory is available, a new worker must start on the same device. Returns the
/// number of runs.
fn enumerate_start() -> usize {
    let wire = || Fabric::new(FabricConfig::default());
    let fabric = wire();
    fabric.record(SERVER, None);
    let (whole, _) = Simulation::on(fabric.clone(), 1, usize::MAX).unwrap();
    let calls = fabric.take_record(SERVER).calls;
    let mappings = usize::MAX - whole.mappings_left;
    let listening = calls.iter().rposition(|call| *call == "listen");
    let listening = listening.expect("it listens");
    let failing = (0..calls.len()).map(Failing::Call);
    let calls = failing.map(|failing| (Some(failing), usize::MAX));
    let without = (0..mappings).map(|at| (None, at));
    let all: Vec<_> = calls.chain(without).collect();
    for (failing, mappings_left) in &all {
        let fabric = wire();
        fabric.record(SERVER, *failing);
        let started = Simulation::on(fabric.clone(), 1, *mappings_left);
        match (started, failing) {
            (Ok((simulation, unserved)), Some(Failing::Call(at))) => {
                drop(simulation);
                // Later calls are only for the discovery of SRP ports, which is optional for
                // initiators.
                let is_named = unserved
                    .iter()
                    .all(|why| why.contains("Cannot allocate memory"));
                let expected = (usize::from(*at <= listening), true);
                assert_eq!(
                    (unserved.len(), is_named),
                    expected,
                    "{failing:?}: {unserved:?}"
                );
            }
            // The last mapping is used for discovery.
            (Ok((_, unserved)), None) => {
                assert_eq!((mappings_left + 1, unserved.len()), (mappings, 0));
            }
            (Err(WorkerError::Memory(why)), None) => {
                assert_eq!(why.raw_os_error(), Some(libc::ENOMEM));
            }
            (Ok(_), other) => panic!("{other:?}"),
            (Err(error), _) => panic!("{failing:?}: {error}"),
        }
        fabric.record(SERVER, None);
        let (_, unserved) = Simulation::on(fabric, 1, usize::MAX).unwrap();
        assert!(unserved.is_empty(), "{failing:?}: {unserved:?}");
    }
    all.len()
}

/// This has to be a single function, because it counts descriptors and threads of the process.
#[test]
fn worker_survives_any_single_failure() {
    let before = footprint();
    println!("result: {} failures at the start", enumerate_start());
    for (protocol, least) in [
        (Protocol::Iscsi, 50),
        (Protocol::Srp, 20),
        (Protocol::Iser, 20),
    ] {
        let runs = enumerate(protocol);
        println!("result: {runs} failures of operations, over {protocol:?}");
        assert!(runs > least, "{runs}");
        let runs = enumerate_device(protocol);
        println!("result: {runs} failures of the device and of memory, over {protocol:?}");
        assert!(runs >= 3, "{runs}");
    }
    assert_eq!(footprint(), before, "descriptors and threads");
}
