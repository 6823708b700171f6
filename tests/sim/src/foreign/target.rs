//! The nodes of a foreign target and the unit that they share.

use std::collections::BTreeSet;
use std::hash::Hasher as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_scsi::srp::{FromInitiator, LoginReq, MultiChannelAction, TskMgmt, TskMgmtFunction};
use riser_transport::loopback::Fabric;
use riser_transport::verbs::{CmId, QpId};
use tracing::trace;

use super::connection::{Carrier, Connection, Gathering, State};
use super::pdu::{BHS, Pdu, header, request, response};
use super::rdma::{Device, Event};
use super::srp::{self, Channel, Received};
use super::unit::{Command, Issuer, Reply, Step, Unit, UnitFaults};
use super::{ForeignFault, IQN, Mischief, Traits, text};
use crate::initiator::Verdict;
use crate::plan::Protocol;

/// Reject reason DATA DIGEST ERROR.
const DATA_DIGEST_ERROR: u8 = 0x02;

/// ABORT TASK, as an iSCSI function.
const ABORT_TASK: u8 = 1;

/// Inaccuracy of the initiator's timers.
const SLACK: Duration = Duration::from_millis(10);

/// Returns the address of a node's portal.
pub(super) fn portal(node: usize, protocol: Protocol) -> SocketAddr {
    let address = Ipv4Addr::new(10, 9, 0, 1 + node as u8);
    let port = match protocol {
        Protocol::Srp => 5555,
        Protocol::Iser | Protocol::Iscsi => 3260,
    };
    SocketAddr::new(IpAddr::V4(address), port)
}

/// Returns the target portal group tag of a node.
fn group(node: usize, traits: &Traits) -> u16 {
    match traits.same_group {
        true => 1,
        false => 1 + node as u16,
    }
}

/// Private data to accept an iSER connection: neither zero-based addresses nor remote invalidation.
const ISER_ACCEPT: [u8; 4] = [0xc0, 0, 0, 0];

/// A node with one portal in a separate portal group.
#[derive(Debug, Default)]
struct Node {
    connections: Vec<Connection>,
    channels: Vec<Channel>,
    /// RDMA device for SRP and iSER.
    device: Option<Device>,
    /// Time when the node last closed connections without a logout.
    closed: Option<Instant>,
}

impl Node {
    fn is_idle(&self) -> bool {
        let mut device = self.device.iter();
        self.connections.is_empty() && self.channels.is_empty() && device.all(Device::is_idle)
    }

    /// Returns whether a session is open.
    fn has_session(&self, session: u64) -> bool {
        let mut connections = self.connections.iter().map(|one| one.number);
        let mut channels = self.channels.iter().map(|one| one.session);
        connections.any(|number| number == session) || channels.any(|number| number == session)
    }
}

/// Permanent faults of nodes and sessions.
#[derive(Clone, Debug, Default)]
pub(super) struct Active {
    stopped: BTreeSet<usize>,
    hung: BTreeSet<usize>,
    redirects: bool,
    damage: f64,
    mischief: Option<(MischiefKind, f64)>,
    pub(super) unit: UnitFaults,
}

/// Kind of a wrong response.
#[derive(Clone, Copy, Debug)]
enum MischiefKind {
    Repeat,
    Unknown,
    SkipNumbers,
}

impl Active {
    pub(super) fn add(&mut self, fault: ForeignFault) {
        match fault {
            ForeignFault::StopPortal(node) => _ = self.stopped.insert(node),
            ForeignFault::HangPortal(node) => _ = self.hung.insert(node),
            ForeignFault::Redirect => self.redirects = true,
            ForeignFault::DamageData(share) => self.damage = share,
            ForeignFault::RepeatResponses(share) => {
                self.mischief = Some((MischiefKind::Repeat, share));
            }
            ForeignFault::UnknownTags(share) => {
                self.mischief = Some((MischiefKind::Unknown, share));
            }
            ForeignFault::SkipNumbers(share) => {
                self.mischief = Some((MischiefKind::SkipNumbers, share));
            }
            fault => self.unit.add(fault),
        }
    }
}

#[derive(Debug)]
pub(super) struct Target {
    unit: Unit,
    traits: Traits,
    protocol: Protocol,
    nodes: [Node; 2],
    active: Active,
    rng: Rng,
    verdict: Verdict,
    numbers: u64,
    pub(super) bytes: u64,
    pub(super) trace: std::collections::hash_map::DefaultHasher,
}

impl Target {
    pub(super) fn new(
        unit: Unit,
        traits: Traits,
        (protocol, fabric): (Protocol, &Fabric),
        rng: Rng,
        verdict: Verdict,
    ) -> Self {
        let node = |node| Node {
            device: (protocol != Protocol::Iscsi)
                .then(|| Device::new(fabric, portal(node, protocol))),
            ..Node::default()
        };
        Self {
            unit,
            traits,
            protocol,
            nodes: [node(0), node(1)],
            active: Active::default(),
            rng,
            verdict,
            numbers: 0,
            bytes: 0,
            trace: std::collections::hash_map::DefaultHasher::new(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.unit.is_idle() && self.nodes.iter().all(Node::is_idle)
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let devices = self.nodes.iter().filter_map(|node| node.device.as_ref());
        let devices = devices.filter_map(Device::next_deadline);
        devices.chain(self.unit.next_deadline()).min()
    }

    /// Updates the active faults.
    pub(super) fn set_active(&mut self, active: Active) {
        self.active = active;
        self.unit.set_faults(self.active.unit.clone());
        for node in 0..self.nodes.len() {
            let is_stopped = self.active.stopped.contains(&node);
            if let Some(device) = &mut self.nodes[node].device {
                device.listen(!is_stopped);
            }
        }
    }

    /// Accepts a connection, or rejects it by dropping the stream.
    pub(super) fn accept(&mut self, to: SocketAddr, stream: UnixStream) {
        trace!(%to, "connects");
        let mut nodes = 0..self.nodes.len();
        let node = nodes.find(|node| portal(*node, self.protocol) == to);
        if let Some(node) = node.filter(|node| !self.active.stopped.contains(node)) {
            self.numbers += 1;
            let connection =
                Connection::new(Carrier::tcp(stream), self.numbers, self.traits.window);
            self.nodes[node].connections.push(connection);
        }
    }

    /// Closes all connections of a node without a logout. If `is_announced` is set, the peers are
    /// notified.
    pub(super) fn close_node(&mut self, node: usize, is_announced: bool, now: Instant) {
        let index = node % 2;
        let node = &mut self.nodes[index];
        let mut connections = node.connections.iter_mut();
        // The initiator must only wait after a lost session, but not for a connection without a
        // login, or if it has closed the connection itself.
        let is_loss = connections.any(|connection| {
            connection.receive();
            let device = node.device.as_mut().zip(connection.qp());
            let is_closed = device.is_some_and(|(device, qp)| device.is_closed(qp));
            matches!(connection.state, State::FullFeature) && !connection.is_over() && !is_closed
        });
        if is_loss {
            node.closed = Some(now);
        }
        let connections = node.connections.drain(..).filter_map(|one| one.qp());
        let channels = node.channels.drain(..).map(|channel| channel.qp);
        for qp in connections.chain(channels) {
            if let Some(device) = &mut node.device {
                device.close(qp, is_announced);
            }
        }
        if self.traits.reports_restarts {
            self.unit.power_on(index);
        }
    }

    /// Closes all connections on all nodes.
    pub(super) fn close_all(&mut self, now: Instant) {
        for node in 0..self.nodes.len() {
            self.close_node(node, true, now);
        }
    }

    /// Writeback fails for cached writes. Returns whether data was lost.
    pub(super) fn lose_cache(&mut self, share: f64) -> bool {
        self.unit.lose_cache(share)
    }

    /// All nodes lose power, which also loses the cache and incomplete writes. Returns whether
    /// acknowledged data was lost.
    pub(super) fn lose_power(&mut self, share: f64, now: Instant) -> bool {
        for node in 0..self.nodes.len() {
            self.close_node(node, false, now);
            self.unit.power_on(node);
        }
        self.unit.lose_power(share)
    }

    /// Requests a logout of all sessions.
    pub(super) fn request_logout(&mut self) {
        for node in &mut self.nodes {
            node.connections
                .iter_mut()
                .for_each(Connection::request_logout);
            node.channels.iter_mut().for_each(Channel::log_out);
        }
    }

    /// Resets the unit, which aborts all of its commands.
    pub(super) fn reset_unit(&mut self, qualifier: u8) {
        for node in &mut self.nodes {
            node.connections
                .iter_mut()
                .for_each(|one| one.gathering.clear());
            node.channels.iter_mut().for_each(Channel::abort_writes);
        }
        for (issuer, reply) in self.unit.reset(qualifier) {
            self.reply(issuer, &reply);
        }
    }

    /// Processes input and completes writes that are due. Returns whether there was any work.
    pub(super) fn turn(&mut self, now: Instant) -> bool {
        let mut has_worked = false;
        for (issuer, reply) in self.unit.land(now) {
            has_worked = true;
            self.reply(issuer, &reply);
        }
        for node in 0..self.nodes.len() {
            if let Some(device) = &mut self.nodes[node].device {
                has_worked |= device.progress(now);
            }
            if self.active.hung.contains(&node) {
                continue;
            }
            has_worked |= self.handle_events(node, now);
            has_worked |= self.serve_connections(node, now);
            has_worked |= self.serve_channels(node);
        }
        let nodes = &self.nodes;
        self.unit
            .retain(|session| nodes.iter().any(|node| node.has_session(session)));
        has_worked
    }

    /// Processes events of a node's device.
    fn handle_events(&mut self, node: usize, now: Instant) -> bool {
        let mut has_worked = false;
        while let Some(event) = self.nodes[node].device.as_mut().and_then(Device::poll) {
            has_worked = true;
            match event {
                Event::Request(cm, private_data) => self.connect(node, cm, &private_data),
                Event::Message(qp, message) => {
                    self.note(&message);
                    if let Some(connection) = self.connection(node, qp) {
                        connection.receive_message(message);
                    } else if let Some(at) = self.channel(node, qp) {
                        self.handle_unit(node, at, &message, now);
                    }
                }
                Event::Fetched(qp, token, data) => self.handle_data(node, qp, token, &data, now),
                Event::Closed(qp) => {
                    if let Some(connection) = self.connection(node, qp) {
                        connection.is_eof = true;
                    } else if let Some(at) = self.channel(node, qp) {
                        self.nodes[node].channels[at].is_over = true;
                    }
                }
            }
        }
        has_worked
    }

    fn connection(&mut self, node: usize, qp: QpId) -> Option<&mut Connection> {
        let mut connections = self.nodes[node].connections.iter_mut();
        connections.find(|connection| connection.qp() == Some(qp))
    }

    fn channel(&self, node: usize, qp: QpId) -> Option<usize> {
        let mut channels = self.nodes[node].channels.iter();
        channels.position(|channel| channel.qp == qp)
    }

    /// Returns whether the initiator has closed an RDMA connection. A node that was hanging first
    /// processes the messages that were received before.
    fn is_closed(&mut self, node: usize, qp: Option<QpId>) -> bool {
        let device = self.nodes[node].device.as_mut().zip(qp);
        device.is_some_and(|(device, qp)| device.is_closed(qp))
    }

    fn note(&mut self, message: &[u8]) {
        self.bytes += message.len() as u64;
        self.trace.write(message);
    }

    /// Called when a peer requests an RDMA connection.
    fn connect(&mut self, node: usize, cm: CmId, private_data: &[u8]) {
        self.numbers += 1;
        let number = self.numbers;
        let is_stopped = self.active.stopped.contains(&node);
        let there = &mut self.nodes[node];
        let device = there.device.as_mut().expect("the device of the event");
        if is_stopped {
            return device.reject(cm);
        }
        if self.protocol == Protocol::Iser {
            if let Some(qp) = device.accept(cm, ISER_ACCEPT.to_vec()) {
                let connection = Connection::new(Carrier::iser(qp), number, self.traits.window);
                there.connections.push(connection);
            }
            return;
        }
        let Ok(login) = LoginReq::parse_rdma(private_data) else {
            return device.reject(cm);
        };
        let is_its = |channel: &Channel| channel.port == login.initiator_port;
        let first = there.channels.iter().find(|channel| is_its(channel));
        let session = first.map(|channel| channel.session);
        if login.multi_channel == MultiChannelAction::Single {
            for channel in there.channels.extract_if(.., |channel| is_its(channel)) {
                device.close(channel.qp, true);
            }
        }
        let is_more = login.multi_channel == MultiChannelAction::Multi;
        let session = session.filter(|_| is_more);
        let response = srp::login_response(&login, session.is_some(), &self.traits);
        if let Some(qp) = device.accept(cm, response) {
            if session.is_none() {
                self.unit.open(number, node);
            }
            let names = (number, session.unwrap_or(number));
            there
                .channels
                .push(Channel::new(qp, names, &login, &self.traits));
        }
    }

    /// Called when an SRP information unit was received.
    fn handle_unit(&mut self, node: usize, at: usize, message: &[u8], now: Instant) {
        let channel = &mut self.nodes[node].channels[at];
        match FromInitiator::parse(message, channel.immediate) {
            Ok(FromInitiator::Cmd(cmd)) => {
                if let Some(received) = channel.receive_command(&cmd) {
                    self.execute_srp(node, at, received, now);
                }
            }
            Ok(FromInitiator::TskMgmt(function)) => self.manage_srp(node, at, &function),
            Ok(FromInitiator::ILogout(_)) => channel.is_over = true,
            Ok(FromInitiator::CredRsp(_) | FromInitiator::AerRsp(_)) => {}
            other => {
                let why = format!("invalid information unit {other:?}");
                self.blame(why);
            }
        }
    }

    fn execute_srp(&mut self, node: usize, at: usize, mut received: Received, now: Instant) {
        let qp = self.nodes[node].channels[at].qp;
        received.command.is_connected = !self.is_closed(node, Some(qp));
        let step = self.unit.execute(&received.command);
        let mischief = match &step {
            Step::Complete(reply) => self.mischief(reply),
            Step::Gather(_) => None,
        };
        let channel = &mut self.nodes[node].channels[at];
        channel.keep_buffers(&received);
        match step {
            Step::Complete(reply) => channel.push_reply(received.tag, &reply, mischief),
            Step::Gather(write) => {
                let tag = received.tag;
                channel.gather(received, write);
                self.continue_srp(node, at, tag, now);
            }
        }
    }

    fn continue_srp(&mut self, node: usize, at: usize, tag: u64, now: Instant) {
        let channel = &mut self.nodes[node].channels[at];
        if let Some(complete) = channel.continue_write(tag) {
            let issuer = Issuer {
                node,
                connection: channel.number,
                isid: [0; 6],
                tag,
            };
            self.unit.write(issuer, complete.write, complete.data, now);
        }
    }

    /// Handles an SRP task management function. A task that is writing to the medium cannot be
    /// aborted, same as with iSCSI, and there is no reset.
    fn manage_srp(&mut self, node: usize, at: usize, function: &TskMgmt) {
        const COMPLETE: u8 = 0;
        const NOT_SUPPORTED: u8 = 4;
        const FAILED: u8 = 5;
        let channel = &mut self.nodes[node].channels[at];
        let task = function.task_tag.0;
        let its = (channel.number, task);
        let is_landing = self.unit.is_writing(|one| (one.connection, one.tag) == its);
        let code = match function.function {
            TskMgmtFunction::AbortTask if is_landing => FAILED,
            TskMgmtFunction::AbortTask => COMPLETE,
            _ => NOT_SUPPORTED,
        };
        channel.push_function(function.tag, task, code);
    }

    /// Called when an RDMA READ has completed.
    fn handle_data(&mut self, node: usize, qp: QpId, token: u64, data: &[u8], now: Instant) {
        if let Some(at) = self.channel(node, qp) {
            let channel = &mut self.nodes[node].channels[at];
            match channel.on_fetched(token, data) {
                Some(received) => self.execute_srp(node, at, received, now),
                None => self.continue_srp(node, at, token, now),
            }
            return;
        }
        let itt = (token as u32).to_be_bytes();
        let mut connections = self.nodes[node].connections.iter();
        let Some(at) = connections.position(|connection| connection.qp() == Some(qp)) else {
            return;
        };
        let mut connection = self.nodes[node].connections.remove(at);
        if let Some(write) = connection.gathering.get_mut(&itt) {
            write.data.extend_from_slice(data);
            write.is_solicited = false;
        }
        self.continue_write(node, &mut connection, itt, now);
        self.nodes[node].connections.insert(at, connection);
    }

    /// Processes input of iSCSI and iSER connections, and sends their output.
    fn serve_connections(&mut self, node: usize, now: Instant) -> bool {
        let mut has_worked = false;
        for mut connection in std::mem::take(&mut self.nodes[node].connections) {
            has_worked |= connection.receive();
            while let Some(pdu) = connection.next_pdu() {
                has_worked = true;
                trace!(node, opcode = pdu.opcode(), cdb = pdu.bhs[32], "receives");
                self.note(&pdu.bhs);
                self.note(&pdu.data);
                self.handle(node, &mut connection, &pdu, now);
                if matches!(connection.state, State::Closing) {
                    break;
                }
            }
            has_worked |= self.finish_reinstatement(node, &mut connection);
            has_worked |= connection.send();
            let there = &mut self.nodes[node];
            if let (Some(qp), Some(device)) = (connection.qp(), &mut there.device) {
                while let Some(work) = connection.next_work() {
                    has_worked = true;
                    device.post(qp, work);
                }
                if connection.is_over() {
                    device.close(qp, true);
                }
            }
            if !connection.is_over() {
                there.connections.push(connection);
            }
        }
        has_worked
    }

    /// Sends the output of SRP channels.
    fn serve_channels(&mut self, node: usize) -> bool {
        let Node {
            channels, device, ..
        } = &mut self.nodes[node];
        let Some(device) = device else {
            return false;
        };
        let mut has_worked = false;
        for channel in &mut *channels {
            while let Some(work) = channel.output.pop_front() {
                has_worked = true;
                device.post(channel.qp, work);
            }
        }
        for channel in channels.extract_if(.., |channel| channel.is_over) {
            has_worked = true;
            device.close(channel.qp, true);
        }
        has_worked
    }

    /// Completes a command if its connection is still open.
    fn reply(&mut self, issuer: Issuer, reply: &Reply) {
        let mischief = self.mischief(reply);
        let node = &mut self.nodes[issuer.node];
        let mut connections = node.connections.iter_mut();
        if let Some(one) = connections.find(|one| one.number == issuer.connection) {
            let itt = (issuer.tag as u32).to_be_bytes();
            return one.push_reply(itt, reply, mischief);
        }
        let mut channels = node.channels.iter_mut();
        if let Some(one) = channels.find(|one| one.number == issuer.connection) {
            one.push_reply(issuer.tag, reply, mischief);
        }
    }

    /// Draws whether a response is wrong, and how. The initiator cannot trust a wrong response, so
    /// this must not be used for a condition that is only reported once.
    fn mischief(&mut self, reply: &Reply) -> Option<Mischief> {
        let (kind, share) = self.active.mischief.filter(|_| !reply.clears_condition())?;
        (self.rng.f64() < share).then(|| match kind {
            MischiefKind::Repeat => Mischief::Repeat,
            MischiefKind::Unknown => Mischief::Unknown(self.rng.u64(..1 << 20)),
            MischiefKind::SkipNumbers => Mischief::SkipNumbers,
        })
    }

    fn handle(&mut self, node: usize, connection: &mut Connection, pdu: &Pdu, now: Instant) {
        match (pdu.opcode(), &connection.state) {
            (request::LOGIN, State::Login) => self.log_in(node, connection, pdu, now),
            (request::NOP_OUT, State::FullFeature) if pdu.itt() != [0xff; 4] => {
                let mut bhs = header(response::NOP_IN, pdu.itt());
                bhs[20..24].fill(0xff);
                connection.push(bhs, &pdu.data);
            }
            (request::NOP_OUT, State::FullFeature) => {}
            (request::SCSI_COMMAND, State::FullFeature) => {
                self.execute(node, connection, pdu, now);
            }
            (request::DATA_OUT, State::FullFeature) => {
                self.receive_data(node, connection, pdu, now);
            }
            (request::TASK_MANAGEMENT, State::FullFeature) => {
                connection.push(self.task_management(connection.number, pdu), &[]);
            }
            (request::TEXT, State::FullFeature) => {
                // The initiator continues an exchange with the TTT.
                let begins = pdu.bhs[20..24] == [0xff; 4];
                connection.push_text(pdu.itt(), begins.then(|| self.listing()));
            }
            (request::LOGOUT, State::FullFeature) => {
                connection.push(header(response::LOGOUT, pdu.itt()), &[]);
                connection.state = State::Closing;
            }
            (opcode, state) => {
                let why = format!("invalid PDU with opcode {opcode:#04x} in {state:?}");
                self.blame(why);
                connection.state = State::Closing;
            }
        }
    }

    /// Returns the text with all targets.
    fn listing(&self) -> Vec<u8> {
        let address = portal(0, self.protocol);
        let others = 1..self.traits.targets;
        let names = std::iter::once(IQN.to_owned());
        let names = names.chain(others.map(|number| format!("{IQN}.{number}")));
        let entry = |name| format!("TargetName={name}\0TargetAddress={address},1\0");
        names.map(entry).collect::<String>().into_bytes()
    }

    fn blame(&self, why: String) {
        self.verdict.borrow_mut().get_or_insert(why);
    }

    /// Handles an iSCSI task management function. A task that is writing to the medium cannot be
    /// aborted: the function is rejected, so the initiator has to wait or drop the session. A
    /// completed task does not exist.
    fn task_management(&self, connection: u64, pdu: &Pdu) -> [u8; BHS] {
        const TASK_DOES_NOT_EXIST: u8 = 1;
        const NOT_SUPPORTED: u8 = 5;
        const REJECTED: u8 = 255;
        let its = (connection, pdu.word(20).into());
        let is_landing = self.unit.is_writing(|one| (one.connection, one.tag) == its);
        let mut bhs = header(response::TASK_MANAGEMENT, pdu.itt());
        bhs[2] = match (pdu.bhs[1] & 0x7f, is_landing) {
            (ABORT_TASK, true) => REJECTED,
            (ABORT_TASK, false) => TASK_DOES_NOT_EXIST,
            _ => NOT_SUPPORTED,
        };
        bhs
    }

    fn log_in(&mut self, node: usize, connection: &mut Connection, pdu: &Pdu, now: Instant) {
        connection.begin_numbers(pdu);
        connection.isid.copy_from_slice(&pdu.bhs[8..14]);
        if self.active.redirects && node == 0 {
            return redirect(connection, pdu, self.protocol, group(1, &self.traits));
        }
        let is_first = !std::mem::replace(&mut connection.has_declared_group, true);
        let group = is_first.then(|| group(node, &self.traits));
        let (text, offer) = text::negotiate(&pdu.data, &self.traits, group);
        let all = &mut connection.offer;
        all.max_recv = offer.max_recv.or(all.max_recv);
        all.max_burst = offer.max_burst.or(all.max_burst);
        all.first_burst = offer.first_burst.or(all.first_burst);
        all.is_discovery |= offer.is_discovery;
        if !all.is_discovery {
            self.check_wait(node, now);
        }
        let is_last = pdu.bhs[1] & 0x83 == 0x83;
        if is_last && !connection.offer.is_discovery {
            // The new session replaces the session of the same initiator port (RFC 7143 6.3.5).
            self.end_sessions(node, connection.isid);
            self.unit.open(connection.number, node);
        }
        let response = login_response(pdu, text);
        if is_last {
            connection.state = State::Reinstating(Box::new(response));
        } else {
            connection.push(response.bhs, &response.data);
        }
    }

    /// Checks that a login was not received earlier than DefaultTime2Wait after a lost connection.
    fn check_wait(&self, node: usize, now: Instant) {
        let time2wait = Duration::from_secs(self.traits.time2wait.into());
        if let Some(closed) = self.nodes[node].closed
            && now + SLACK < closed + time2wait
        {
            let waited = now - closed;
            self.blame(format!(
                "a login {waited:?} after a lost connection, but DefaultTime2Wait is {time2wait:?}"
            ));
        }
    }

    /// Closes all other connections of an initiator port.
    fn end_sessions(&mut self, node: usize, isid: [u8; 6]) {
        let Node {
            connections,
            device,
            ..
        } = &mut self.nodes[node];
        let is_its = |one: &mut Connection| one.isid == isid && !one.offer.is_discovery;
        for old in connections.extract_if(.., is_its) {
            if let (Some(qp), Some(device)) = (old.qp(), device.as_mut()) {
                device.close(qp, true);
            }
        }
    }

    /// Completes a login when no write of the previous session is in flight to the medium.
    fn finish_reinstatement(&self, node: usize, connection: &mut Connection) -> bool {
        let isid = connection.isid;
        let is_discovery = connection.offer.is_discovery;
        if !matches!(connection.state, State::Reinstating(_))
            || !is_discovery
                && self
                    .unit
                    .is_writing(|one| (one.node, one.isid) == (node, isid))
        {
            return false;
        }
        let state = std::mem::replace(&mut connection.state, State::FullFeature);
        if let State::Reinstating(response) = state {
            connection.push(response.bhs, &response.data);
        }
        true
    }

    fn execute(&mut self, node: usize, connection: &mut Connection, pdu: &Pdu, now: Instant) {
        let command = Command {
            session: connection.number,
            cdb: pdu.bhs[32..48].try_into().expect("sixteen bytes"),
            expected: pdu.word(20),
            is_counted: self.protocol == Protocol::Iscsi,
            is_connected: !connection.is_eof && !self.is_closed(node, connection.qp()),
        };
        let step = self.unit.execute(&command);
        let write = match step {
            Step::Complete(reply) => {
                let mischief = self.mischief(&reply);
                return connection.push_reply(pdu.itt(), &reply, mischief);
            }
            Step::Gather(write) => write,
        };
        if !pdu.data.is_empty() && self.rng.f64() < self.active.damage {
            // Without error recovery, the target rejects the PDU and drops the session.
            let mut bhs = header(response::REJECT, [0xff; 4]);
            bhs[2] = DATA_DIGEST_ERROR;
            connection.push(bhs, &pdu.bhs);
            connection.state = State::Closing;
            self.nodes[node].closed = Some(now);
            return;
        }
        let gathering = Gathering {
            write,
            data: pdu.data.clone(),
            expected: pdu.word(20) as usize,
            immediate: pdu.data.len(),
            buffer: pdu.write_buffer,
            is_solicited: false,
            awaits_unsolicited: !pdu.is_final(),
        };
        connection.gathering.insert(pdu.itt(), gathering);
        self.continue_write(node, connection, pdu.itt(), now);
    }

    fn receive_data(&mut self, node: usize, connection: &mut Connection, pdu: &Pdu, now: Instant) {
        let itt = pdu.itt();
        let Some(write) = connection.gathering.get_mut(&itt) else {
            return;
        };
        let offset = pdu.word(40) as usize;
        if offset != write.data.len() || offset + pdu.data.len() > write.expected {
            let why = format!("invalid Data-Out buffer offset {offset}");
            return self.blame(why);
        }
        write.data.extend_from_slice(&pdu.data);
        if pdu.is_final() {
            (write.awaits_unsolicited, write.is_solicited) = (false, false);
            self.continue_write(node, connection, itt, now);
        }
    }

    /// Solicits missing data of a write, or starts to write to the medium.
    fn continue_write(
        &mut self,
        node: usize,
        connection: &mut Connection,
        itt: [u8; 4],
        now: Instant,
    ) {
        let Some(write) = connection.gathering.get(&itt) else {
            return;
        };
        if write.awaits_unsolicited || write.is_solicited {
            return;
        }
        if write.expected > write.data.len() {
            return connection.request_data(itt);
        }
        let issuer = Issuer {
            node,
            connection: connection.number,
            isid: connection.isid,
            tag: u32::from_be_bytes(itt).into(),
        };
        if let Some(complete) = connection.gathering.remove(&itt) {
            self.unit.write(issuer, complete.write, complete.data, now);
        }
    }
}

/// Creates a Login Response that continues or completes the login.
fn login_response(pdu: &Pdu, text: Vec<u8>) -> Pdu {
    let mut bhs = header(response::LOGIN, pdu.itt());
    bhs[1] = pdu.bhs[1];
    bhs[8..14].copy_from_slice(&pdu.bhs[8..14]);
    bhs[15] = 1;
    Pdu::new(bhs, text)
}

/// Temporarily redirects a login to the second node.
fn redirect(connection: &mut Connection, pdu: &Pdu, protocol: Protocol, group: u16) {
    const REDIRECTION: u8 = 1;
    const MOVED_TEMPORARILY: u8 = 1;
    let text = format!("TargetAddress={},{group}\0", portal(1, protocol));
    let mut response = login_response(pdu, text.into_bytes());
    // No transition to another stage.
    response.bhs[1] &= 0x0c;
    response.bhs[36..38].copy_from_slice(&[REDIRECTION, MOVED_TEMPORARILY]);
    connection.push(response.bhs, &response.data);
    connection.state = State::Closing;
}
