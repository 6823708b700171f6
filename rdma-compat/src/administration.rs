//! Subnet administration for programs that use libibumad, and for routes of `rdma_getaddrinfo`.
//!
//! On RoCE, subnet administrators have no LID, so `RISER_SA` contains the address of the
//! administrator, for example of a `riser-sa`. MADs from programs are sent to its queue pair 1. If
//! this variable is not set, each process uses its own administrator, which doesn't know any other
//! hosts, but responds to queries for paths that can be computed. A program can also specify a host
//! by its GID.
//!
//! The kernel puts the number of an agent into the upper half of a transaction identifier. We do
//! the same, and use its low bits for the slot number of the process, so that responses can be
//! delivered to the correct process (`broker`).

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use riser_fabric::sa::administrator::{Administrator, AdministratorConfig};
use riser_fabric::sa::client::{ClientConfig, QueryId, Request, SaClient, SaError, SaEvent};
use riser_fabric::sa::rmpp::{Received, Receiver};
use riser_fabric::sa::wire::path::PathRecord;
use riser_fabric::sa::wire::{DATA, SaHeader};
use riser_transport::roce::Roce;
use riser_transport::verbs::{Gid, Mtu};
use riser_transport::wire::Mad;
use riser_transport::wire::mad::{MadHeader, RESPONSE};

use crate::broker::BITS;
use crate::mad::{MadResponse, UserMad};
use crate::queue::EventQueue;

/// Timeout of the library's own queries before each retransmission.
const TIMEOUT: Duration = Duration::from_millis(500);

/// Time without further path queries after the administrator has not responded, unless it sends a
/// response in the meantime. Each query blocks a call until its last retransmission has timed out.
/// (librdmacm tries to connect to ibacm's daemon only once, at the first `rdma_getaddrinfo` of a
/// process.)
const PAUSE: Duration = Duration::from_secs(30);

/// Offset of the transaction identifier in a MAD.
const TRANSACTION: usize = 8;

/// A request of a program that is waiting for its response.
struct Question {
    head: UserMad,
    mad: Mad,
    to: IpAddr,
    /// Queue for the response.
    responses: Arc<EventQueue<MadResponse>>,
    deadline: Instant,
    retries: u32,
    /// The segments of the response received so far, and the first segment.
    partly: Option<(Box<Mad>, Receiver)>,
}

/// Administration requests of a process.
pub(crate) struct Administration {
    /// GID of the device.
    own: Gid,
    /// Slot number of the process.
    slot: u32,
    /// Number of the last request.
    last: u32,
    /// The process's own administrator, if no other is configured.
    local: Option<Administrator>,
    /// Address of the administrator to use if no GID is specified.
    addr: IpAddr,
    questions: Vec<Question>,
    /// Queries of the library itself.
    client: SaClient,
    /// Path queries, and the calls waiting for them.
    paths: Vec<(QueryId, Sender<Option<PathRecord>>)>,
    /// The administrator has not responded: end of the [`PAUSE`].
    paused_until: Option<Instant>,
}

impl Administration {
    pub(crate) fn new(own: IpAddr, mtu: Mtu, slot: u32, named: Option<IpAddr>) -> Self {
        // The private administrator has no other hosts, which could guess its probe identifiers, so
        // it needs no secret.
        let local = || Administrator::new(AdministratorConfig::new(own, mtu, [0; 16]));
        let addr = named.unwrap_or(own);
        let [first, prefix] = [(); 2].map(|()| getrandom::u32().unwrap_or_default());
        let config = ClientConfig {
            timeout: TIMEOUT,
            transaction_prefix: prefix << BITS | slot,
            ..ClientConfig::new(addr.into())
        };
        Self {
            own: own.into(),
            slot,
            // This is random, so that other hosts can't guess it and forge responses, and so that
            // late responses to a process that used the slot before are not mistaken for ours.
            last: getrandom::u32().unwrap_or_default(),
            local: named.is_none().then(local),
            addr,
            questions: Vec::new(),
            client: SaClient::new(config, first),
            paths: Vec::new(),
            paused_until: None,
        }
    }

    /// Sends a datagram of a program, with its header. `host` is the host specified by GID, if any.
    pub(crate) fn send(
        &mut self,
        nic: &mut Roce,
        (mut head, mut mad): (UserMad, Mad),
        host: Option<IpAddr>,
        responses: Arc<EventQueue<MadResponse>>,
    ) {
        let now = Instant::now();
        self.last = self.last.wrapping_add(1);
        let prefix = self.last << BITS | self.slot;
        mad[TRANSACTION..TRANSACTION + 4].copy_from_slice(&prefix.to_be_bytes());
        let to = host.unwrap_or(self.addr);
        let timeout = head.timeout();
        if !timeout.is_zero() {
            head.set_length(mad.len());
            self.questions.push(Question {
                head,
                mad,
                to,
                responses,
                deadline: now + timeout,
                retries: head.retries(),
                partly: None,
            });
        }
        self.transmit(nic, to, &mad);
        self.progress(nic);
    }

    /// Requests a path to another port. `done` receives `None` if there is no path, or no response
    /// after some retransmissions. In the latter case, further requests fail immediately for a while,
    /// unless the administrator sends any response in the meantime.
    pub(crate) fn request_path(
        &mut self,
        nic: &mut Roce,
        to: Gid,
        done: Sender<Option<PathRecord>>,
    ) {
        let now = Instant::now();
        if self.paused_until.is_some_and(|until| now < until) {
            // The caller is still waiting, so it receives this.
            let _ = done.send(None);
            return;
        }
        let request = Request::path(self.own, to, None, None);
        match self.client.query(now, request) {
            Ok(id) => self.paths.push((id, done)),
            // There are too many queries. The caller is still waiting here, too.
            Err(_) => drop(done.send(None)),
        }
        self.progress(nic);
    }

    /// Sends queries of the library.
    fn send_queries(&mut self, nic: &mut Roce, now: Instant) {
        self.client.handle_timeout(now);
        while let Some(mad) = self.client.poll_transmit() {
            self.transmit(nic, self.addr, &mad);
        }
    }

    /// Passes results of path queries to the calls waiting for them.
    fn complete_paths(&mut self) {
        while let Some(event) = self.client.poll_event() {
            // The library does not subscribe to notices.
            let SaEvent::Completed { id, result } = event else {
                continue;
            };
            if matches!(result, Err(SaError::TimedOut)) {
                self.paused_until = Some(Instant::now() + PAUSE);
            }
            if let Some(at) = self.paths.iter().position(|(query, _)| *query == id) {
                let (_, done) = self.paths.swap_remove(at);
                // The call may not be waiting anymore.
                let _ = done.send(result.ok().and_then(|response| response.record()));
            }
        }
    }

    fn transmit(&mut self, nic: &mut Roce, to: IpAddr, mad: &Mad) {
        match &mut self.local {
            Some(local) if to == self.addr => local.handle_mad(Instant::now(), self.own, mad),
            // If this fails, it is retransmitted like a lost request.
            _ => drop(nic.send_mad(to, mad)),
        }
    }

    /// Processes received MADs and expired timers.
    pub(crate) fn progress(&mut self, nic: &mut Roce) {
        while let Some((from, mad)) = nic.poll_mad() {
            self.handle_mad(nic, from, &mad);
        }
        let now = Instant::now();
        self.send_queries(nic, now);
        if let Some(local) = &mut self.local {
            local.handle_timeout(now);
        }
        while let Some((to, mad)) = self
            .local
            .as_mut()
            .and_then(|local| local.poll_transmit(now))
        {
            debug_assert_eq!(to, self.own);
            self.handle_mad(nic, self.addr, &mad);
        }
        self.complete_paths();
        let mut at = 0;
        while at < self.questions.len() {
            let question = &mut self.questions[at];
            if question.deadline > now {
                at += 1;
            } else if question.retries == 0 {
                let Question {
                    mut head,
                    mad,
                    responses,
                    ..
                } = self.questions.swap_remove(at);
                head.set_status(libc::ETIMEDOUT);
                responses.push(MadResponse::new(head, mad.to_vec()));
            } else {
                question.retries -= 1;
                question.deadline = now + question.head.timeout();
                question.partly = None;
                let (to, mad) = (question.to, question.mad);
                self.transmit(nic, to, &mad);
                at += 1;
            }
        }
    }

    fn handle_mad(&mut self, nic: &mut Roce, from: IpAddr, mad: &Mad) {
        let Ok((header, data)) = SaHeader::parse(mad) else {
            return;
        };
        let transaction = header.mad.transaction();
        let is_it = |question: &Question| {
            let request = MadHeader::of(&question.mad);
            question.to == from
                && request.transaction() == transaction
                && request.attribute() == header.mad.attribute()
        };
        if header.mad.method() & RESPONSE == 0 {
            return;
        }
        if from == self.addr {
            self.paused_until = None;
        }
        self.client.handle_mad(Instant::now(), from.into(), mad);
        let Some(at) = self.questions.iter().position(is_it) else {
            return;
        };
        if !header.rmpp.is_active() {
            self.complete_query(at, mad.to_vec());
            return;
        }
        let question = &mut self.questions[at];
        let begin = || (Box::new(*mad), Receiver::default());
        let (first, receiver) = question.partly.get_or_insert_with(begin);
        if header.rmpp.segment.get() == 1 {
            // A later segment may have been received before the first one.
            **first = *mad;
        }
        let before = receiver.arrived();
        let (reply, is_done) = match receiver.handle(&header, data) {
            Received::Going(reply) => {
                // Retransmitted segments do not extend the deadline.
                if receiver.arrived() > before {
                    question.deadline = Instant::now() + question.head.timeout();
                }
                (reply, false)
            }
            Received::Done(reply) => (Some(reply), true),
            Received::Failed(reply) => {
                // The request will be retried when its deadline expires.
                question.partly = None;
                (reply, false)
            }
        };
        if is_done && let Some((first, receiver)) = question.partly.take() {
            // We use the same format as the kernel: the first header, followed by the data of all
            // segments.
            let mut bytes = first[..DATA].to_vec();
            bytes.extend(receiver.into_data());
            self.complete_query(at, bytes);
        }
        if let Some(reply) = reply {
            self.transmit(nic, from, &reply);
        }
    }

    fn complete_query(&mut self, at: usize, bytes: Vec<u8>) {
        let Question {
            mut head,
            responses,
            ..
        } = self.questions.swap_remove(at);
        head.set_status(0);
        head.set_length(bytes.len());
        responses.push(MadResponse::new(head, bytes));
    }

    /// Drops the requests of a closed port.
    pub(crate) fn forget(&mut self, responses: &Arc<EventQueue<MadResponse>>) {
        self.questions
            .retain(|question| !Arc::ptr_eq(&question.responses, responses));
    }

    /// Returns the time when [`Self::progress`] must be called.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let questions = self.questions.iter().map(|question| question.deadline);
        let local = self.local.as_ref().and_then(Administrator::poll_timeout);
        let own = self.client.poll_timeout();
        questions.chain(local).chain(own).min()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use riser_fabric::sa::wire::{DATA_LEN, Record as _, SaMethod};
    use riser_transport::roce::RoceConfig;
    use riser_transport::verbs::Provider as _;
    use riser_transport::wire::TransactionId;
    use riser_transport::wire::mad::MadClass;

    use super::*;
    use crate::broker::slot_of_response;

    /// Creates a device, an administration object and a queue for responses.
    fn open(
        last: u8,
        named: Option<IpAddr>,
    ) -> (Roce, Administration, Arc<EventQueue<MadResponse>>) {
        let addr = IpAddr::from([127, 98, 0, last]);
        let mut nic = Roce::open(&RoceConfig::new(addr)).unwrap();
        nic.register_agent(MadClass::SubnetAdm).unwrap();
        let administration = Administration::new(addr, Mtu::Mtu4096, 9, named);
        (nic, administration, Arc::new(EventQueue::new().unwrap()))
    }

    fn mad(method: SaMethod) -> Mad {
        let record = PathRecord {
            dgid: Gid::from(IpAddr::from([127, 98, 0, 77])).0,
            ..PathRecord::default()
        };
        // Only a Get has a destination.
        let mask = if method == SaMethod::Get { 4 } else { 0 };
        Request::new(method, mask, &record).emit(TransactionId(0x1234_5678))
    }

    #[test]
    fn private_administrator_serves_requests() {
        let (mut nic, mut administration, responses) = open(40, None);
        let head = UserMad::with_timeout(1000, 0);
        let request = (head, mad(SaMethod::Get));
        administration.send(&mut nic, request, None, Arc::clone(&responses));
        let (status, bytes) = responses.pop_event(|_| {}).unwrap().into_parts();
        assert_eq!((status, bytes.len()), (0, DATA + DATA_LEN));
        // The lower half of the transaction identifier was set by the program. The low bits of the
        // upper half identify the process.
        assert_eq!(bytes[12..16], [0x12, 0x34, 0x56, 0x78]);
        assert_eq!(slot_of_response(&bytes), Some(9));
        let path = PathRecord::read(&bytes[DATA..]).unwrap();
        assert_eq!(path.dgid().ip(), IpAddr::from([127, 98, 0, 77]));
        // For a table, the header is followed by the records from all MADs.
        let request = (head, mad(SaMethod::GetTable));
        administration.send(&mut nic, request, None, Arc::clone(&responses));
        let (status, bytes) = responses.pop_event(|_| {}).unwrap().into_parts();
        assert_eq!((status, bytes.len()), (0, DATA + 64));
        assert!(administration.questions.is_empty());
    }

    #[test]
    fn library_queries_path_of_private_administrator() {
        let (mut nic, mut administration, _) = open(45, None);
        let (done, path) = mpsc::channel();
        let to = Gid::from(IpAddr::from([127, 98, 0, 77]));
        administration.request_path(&mut nic, to, done);
        let path = path.try_recv().unwrap().unwrap();
        assert_eq!((path.dgid(), path.sgid), (to, administration.own.0));
        assert!(administration.paths.is_empty());
        assert_eq!(administration.client.poll_timeout(), None);
    }

    #[test]
    fn path_query_without_response_fails() {
        let (mut nic, mut administration, _) = open(46, Some([127, 98, 0, 47].into()));
        let (done, path) = mpsc::channel();
        let to = Gid::from(IpAddr::from([127, 98, 0, 77]));
        administration.request_path(&mut nic, to, done);
        assert!(path.try_recv().is_err());
        assert!(administration.deadline().unwrap() <= Instant::now() + TIMEOUT);
        while administration.deadline().is_some() {
            thread::sleep(Duration::from_millis(20));
            nic.progress(Instant::now());
            administration.progress(&mut nic);
        }
        assert_eq!(path.try_recv(), Ok(None));
        // The next query fails immediately, until the pause is over or a response arrives.
        let request_again = |nic: &mut Roce, administration: &mut Administration| {
            let (done, path) = mpsc::channel();
            administration.request_path(nic, to, done);
            path.try_recv().ok()
        };
        assert_eq!(request_again(&mut nic, &mut administration), Some(None));
        assert_eq!(administration.deadline(), None, "nothing was sent");
        let pause = administration.paused_until.unwrap();
        assert!(pause <= Instant::now() + PAUSE && pause > Instant::now() + PAUSE / 2);
        administration.paused_until = Some(Instant::now());
        assert_eq!(request_again(&mut nic, &mut administration), None);
        administration.paused_until = Some(pause);
        let mut response = mad(SaMethod::Get);
        response[3] = 0x81;
        administration.handle_mad(&mut nic, IpAddr::from([127, 98, 0, 48]), &response);
        assert_eq!(request_again(&mut nic, &mut administration), Some(None));
        let administrator = administration.addr;
        administration.handle_mad(&mut nic, administrator, &response);
        assert_eq!(request_again(&mut nic, &mut administration), None);
    }

    #[test]
    fn unanswered_request_is_returned() {
        let (mut nic, mut administration, responses) = open(41, Some([127, 98, 0, 42].into()));
        let request = (UserMad::with_timeout(10, 2), mad(SaMethod::Get));
        administration.send(&mut nic, request, None, Arc::clone(&responses));
        let sent = Instant::now();
        while administration.deadline().is_some() {
            thread::sleep(Duration::from_millis(2));
            nic.progress(Instant::now());
            administration.progress(&mut nic);
        }
        assert!(sent.elapsed() >= Duration::from_millis(30));
        let (status, bytes) = responses.pop_event(|_| {}).unwrap().into_parts();
        assert_eq!((status, bytes.len()), (libc::ETIMEDOUT, DATA + DATA_LEN));
        // No response is returned after the port was closed.
        administration.send(&mut nic, request, None, Arc::clone(&responses));
        administration.forget(&responses);
        assert_eq!(administration.deadline(), None);
    }

    #[test]
    fn repeated_segments_do_not_extend_deadline() {
        let there = IpAddr::from([127, 98, 0, 44]);
        let (mut nic, mut administration, responses) = open(43, Some(there));
        let request = (UserMad::with_timeout(1000, 0), mad(SaMethod::GetTable));
        administration.send(&mut nic, request, None, responses);
        let mut segment = administration.questions[0].mad;
        segment[3] = 0x92;
        // The first of several segments, and a segment that arrives too early.
        segment[24..27].copy_from_slice(&[1, 1, 3]);
        segment[31] = 1;
        let mut early = segment;
        (early[26], early[31]) = (1, 3);
        administration.handle_mad(&mut nic, there, &segment);
        let deadline = administration.deadline();
        for mad in [&segment, &early, &segment] {
            thread::sleep(Duration::from_millis(2));
            administration.handle_mad(&mut nic, there, mad);
            assert_eq!(administration.deadline(), deadline);
        }
    }
}
