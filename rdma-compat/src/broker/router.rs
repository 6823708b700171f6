//! Selects the process for each incoming packet of an address.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use riser_transport::roce::ForwardedPacket;
use riser_transport::roce::steer::{Requests, steer};
use riser_transport::wire::cm_msg::{CmMessage, CommId, is_request};
use riser_transport::wire::cma::RdmaPortSpace;
use riser_transport::wire::mad::{MadClass, RESPONSE};
use riser_transport::wire::{Mad, MadHeader};

use super::BITS;
use super::ports::{Port, PortTable};

/// Maximum time that a request waits for a listener.
pub(super) const LISTEN_GRACE: Duration = Duration::from_millis(300);

/// Maximum number of requests that wait for listeners, in total and for each peer address.
/// Additional requests are rejected immediately.
const MAX_EARLY: usize = 64;
const MAX_EARLY_PER_PEER: usize = MAX_EARLY / 8;

/// Number of requests whose processes are recorded. If the requests of two peers use the same
/// entry, a message that cancels the older request is lost, and that request times out.
const REQUESTS: usize = 1 << 12;

/// Offset of the MAD in a packet, after BTH and DETH.
const MAD: usize = 20;
const MAD_LEN: usize = 256;

/// Returns the slot of the process that a response of a subnet administrator is for.
pub(crate) fn slot_of_response(mad: &[u8]) -> Option<u8> {
    let mad: &Mad = mad.try_into().ok()?;
    let header = MadHeader::of(mad);
    let is_response =
        header.class() == MadClass::SubnetAdm as u8 && header.method() & RESPONSE != 0;
    is_response.then(|| (header.transaction().0 >> 32) as u8 & ((1 << BITS) - 1))
}

/// A request for a port without a listener.
struct EarlyRequest {
    port: Port,
    /// Time when it is delivered even if there is no listener.
    until: Instant,
    packet: ForwardedPacket,
}

/// The processes of an address with their ports and requests.
///
/// Some programs use a separate protocol through which the server reports that it is listening, and
/// the client can connect. They rely on the time needed for address resolution, which takes a while
/// with a kernel, but is immediate here. So we let a request for a port without a listener wait for
/// [`LISTEN_GRACE`].
pub(super) struct Router {
    slots: BTreeSet<u8>,
    pub(super) ports: PortTable,
    /// Slots that recent requests were delivered to, by a hash of the request; 0 if unknown. If a
    /// peer cancels a request before it gets a response, its message only contains its own ID.
    requests: Vec<u8>,
    /// Requests waiting for a listener, oldest first.
    early: VecDeque<EarlyRequest>,
}

impl Router {
    pub(super) fn new() -> Self {
        Self {
            slots: BTreeSet::new(),
            ports: PortTable::default(),
            requests: vec![0; REQUESTS],
            early: VecDeque::new(),
        }
    }

    /// Adds a process.
    pub(super) fn add(&mut self, slot: u8) {
        self.slots.insert(slot);
    }

    /// Removes a process that has exited, with its ports and requests.
    pub(super) fn remove(&mut self, slot: u8) {
        self.slots.remove(&slot);
        self.ports.release_all(slot);
        for request in &mut self.requests {
            if *request == slot {
                *request = 0;
            }
        }
    }

    /// Returns the slot of the process that handles a packet, or `None` if the packet waits for a
    /// listener or there is no process for it.
    ///
    /// A packet that does not belong to any process in particular, such as a request for a port
    /// without a listener, is delivered to the process in the lowest slot, whose NIC rejects it.
    pub(super) fn route(&mut self, now: Instant, packet: &ForwardedPacket) -> Option<u8> {
        self.route_until(packet, Some(now + LISTEN_GRACE))
    }

    /// Returns the next waiting request that has a listener or has reached its deadline, and its
    /// process.
    pub(super) fn poll_early(&mut self, now: Instant) -> Option<(u8, ForwardedPacket)> {
        loop {
            let ports = &self.ports;
            let is_due =
                |early: &EarlyRequest| early.until <= now || ports.listener(early.port).is_some();
            let at = self.early.iter().position(is_due)?;
            let EarlyRequest { packet, .. } = self.early.remove(at)?;
            if let Some(slot) = self.route_until(&packet, None) {
                return Some((slot, packet));
            }
        }
    }

    /// Returns the time when [`Router::poll_early`] must be called.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.early.front().map(|early| early.until)
    }

    /// Same as [`Router::route`], for a request that waits until the given time, if any.
    fn route_until(&mut self, packet: &ForwardedPacket, until: Option<Instant>) -> Option<u8> {
        let worker = steer(&packet.bytes, BITS, Requests::ToFirst).unwrap_or(0) as u8;
        if worker != 0 {
            return self.slots.contains(&worker).then_some(worker);
        }
        let first = *self.slots.first()?;
        let mad = packet.bytes.get(MAD..MAD + MAD_LEN);
        if let Some(slot) = mad.and_then(slot_of_response) {
            return Some(self.slots.get(&slot).copied().unwrap_or(first));
        }
        let peer = packet.src.ip();
        let (service, id) = match request_in(packet) {
            Some(CmMessage::Req(request)) => (request.service_id, Some(request.local_comm_id)),
            Some(CmMessage::SidrReq(request)) => (request.service_id, None),
            // A REJ is for the process that has received the request.
            Some(CmMessage::Rej(rej)) => {
                if self.cancel_early(peer, rej.local_comm_id) {
                    return None;
                }
                let slot = self.requests[request_index(peer, rej.local_comm_id)];
                return Some(self.slots.get(&slot).copied().unwrap_or(first));
            }
            _ => return Some(first),
        };
        let port = RdmaPortSpace::of(service);
        let slot = match port.and_then(|port| self.ports.listener(port)) {
            Some(slot) => slot,
            None => {
                if let Some((port, until)) = port.zip(until)
                    && self.keep_early(port, until, packet)
                {
                    return None;
                }
                first
            }
        };
        if let Some(id) = id {
            self.requests[request_index(peer, id)] = slot;
        }
        Some(slot)
    }

    /// Stores a request for a port. Returns false if there are too many.
    fn keep_early(&mut self, port: Port, until: Instant, packet: &ForwardedPacket) -> bool {
        let (mad, peer) = (MAD..MAD + MAD_LEN, packet.src.ip());
        let of_peer = self
            .early
            .iter()
            .filter(|early| early.packet.src.ip() == peer);
        // A retransmitted request is already stored.
        if of_peer
            .clone()
            .any(|early| early.packet.bytes[mad.clone()] == packet.bytes[mad.clone()])
        {
            return true;
        }
        let has_place = of_peer.count() < MAX_EARLY_PER_PEER && self.early.len() < MAX_EARLY;
        if has_place {
            self.early.push_back(EarlyRequest {
                port,
                until,
                packet: packet.clone(),
            });
        }
        has_place
    }

    /// Removes a waiting request that was cancelled by its peer. Returns whether there was one.
    fn cancel_early(&mut self, peer: IpAddr, id: CommId) -> bool {
        let before = self.early.len();
        self.early.retain(|early| match request_in(&early.packet) {
            Some(CmMessage::Req(request)) => {
                early.packet.src.ip() != peer || request.local_comm_id != id
            }
            _ => true,
        });
        self.early.len() < before
    }
}

/// Returns the index of a peer's request in the table of requests.
fn request_index(peer: IpAddr, id: CommId) -> usize {
    // IDs of a peer may be consecutive, and so may addresses.
    let mut hasher = DefaultHasher::new();
    (peer.to_canonical(), id).hash(&mut hasher);
    hasher.finish() as usize % REQUESTS
}

/// Returns the CM message in a packet, if it is a message that does not contain any of our IDs.
fn request_in(packet: &ForwardedPacket) -> Option<CmMessage> {
    let mad = packet.bytes.get(MAD..MAD + MAD_LEN);
    let mad = mad.filter(|mad| is_request(mad))?;
    CmMessage::parse(mad).ok().map(|(_, message)| message)
}

#[cfg(test)]
pub(super) mod tests {
    use riser_transport::nic::IpFields;
    use riser_transport::verbs::PKey;
    use riser_transport::wire::cm_msg::{
        AdditionalInfo, PrivateData, RejMsg, RejOf, RejReason, SidrReqMsg,
    };
    use riser_transport::wire::mad::TransactionId;

    use super::*;

    const PORT: Port = (RdmaPortSpace::Tcp, 7471);

    fn datagram(message: &CmMessage) -> Vec<u8> {
        let mut datagram = vec![0; MAD];
        datagram[7] = 1;
        datagram.extend(message.emit(TransactionId(5)));
        datagram.extend([0; 4]);
        datagram
    }

    /// Creates a request to the process with datagram port 7471.
    pub(in super::super) fn sidr_request() -> Vec<u8> {
        datagram(&CmMessage::SidrReq(SidrReqMsg {
            request_id: CommId(0x0102_0304),
            pkey: PKey(0xffff),
            service_id: RdmaPortSpace::Udp.service_id(7471),
            private_data: PrivateData::default(),
        }))
    }

    /// Creates a request with this ID for the connection service of port 7471.
    fn request(id: u32) -> Vec<u8> {
        let mut request = vec![0; MAD + MAD_LEN];
        request[7] = 1;
        // The header of a REQ, its ID and the service ID.
        request[MAD..MAD + 4].copy_from_slice(&[1, 7, 2, 3]);
        request[MAD + 17] = 0x10;
        request[MAD + 24..MAD + 28].copy_from_slice(&id.to_be_bytes());
        request[MAD + 32..MAD + 40].copy_from_slice(&0x0106_1d2f_u64.to_be_bytes());
        request.extend([0; 4]);
        request
    }

    /// Creates the message that a peer uses to cancel its request.
    fn cancellation(id: u32) -> Vec<u8> {
        datagram(&CmMessage::Rej(RejMsg {
            local_comm_id: CommId(id),
            remote_comm_id: CommId(0),
            message: RejOf::NoMessage,
            reason: RejReason::Timeout,
            info: AdditionalInfo::new(&[7; 8]).unwrap(),
            private_data: PrivateData::default(),
        }))
    }

    /// Creates a packet from an address.
    fn packet(from: u8, bytes: Vec<u8>) -> ForwardedPacket {
        ForwardedPacket {
            worker: 0,
            src: ([127, 98, 0, from], 9000).into(),
            ip: IpFields::default(),
            bytes,
        }
    }

    /// Creates a router with three processes.
    fn router() -> Router {
        let mut router = Router::new();
        for slot in [2, 3, 4] {
            router.add(slot);
        }
        router
    }

    fn listen(router: &mut Router, slot: u8) {
        router.ports.allocate(slot, PORT).unwrap();
        router.ports.set_listening(slot, PORT, true);
    }

    #[test]
    fn packets_reach_their_process() {
        let (mut router, now) = (router(), Instant::now());
        let mut data = vec![0; 64];
        for (worker, slot) in [(3, Some(3)), (4, Some(4)), (5, None)] {
            data[5..8].copy_from_slice(&[0x12, 0x34, 0x20 | worker]);
            assert_eq!(router.route(now, &packet(11, data.clone())), slot);
        }
        // The transaction ID of a response contains the slot.
        for (slot, to) in [(4, 4), (9, 2)] {
            let mut response = vec![0; MAD + MAD_LEN];
            response[7] = 1;
            response[MAD..MAD + 4].copy_from_slice(&[1, 3, 2, 0x81]);
            response[MAD + 11] = slot;
            assert_eq!(router.route(now, &packet(11, response)), Some(to));
        }
        listen(&mut router, 3);
        assert_eq!(router.route(now, &packet(11, request(1))), Some(3));
        // A request without a port, and anything that is not a CM message.
        let mut service = request(2);
        service[MAD + 32] = 1;
        assert_eq!(router.route(now, &packet(11, service)), Some(2));
        let mut query = request(3);
        query[MAD + 1] = 6;
        assert_eq!(router.route(now, &packet(11, query)), Some(2));
    }

    #[test]
    fn early_request_waits_for_listener() {
        let (mut router, now) = (router(), Instant::now());
        let early = packet(11, request(1));
        assert_eq!(router.route(now, &early), None);
        assert_eq!(router.deadline(), Some(now + LISTEN_GRACE));
        // A process has allocated the port, but is not listening yet.
        router.ports.allocate(3, PORT).unwrap();
        assert_eq!(router.poll_early(now), None);
        router.ports.set_listening(3, PORT, true);
        assert_eq!(router.poll_early(now), Some((3, early.clone())));
        assert_eq!(router.deadline(), None);
        // Subsequent messages of the peer about this request are sent to the listener.
        assert_eq!(router.route(now, &packet(11, cancellation(1))), Some(3));

        // If the listener exits, the port has no listener, and the request is eventually rejected.
        router.remove(3);
        for early in [early, packet(11, sidr_request())] {
            assert_eq!(router.route(now, &early), None);
            let until = now + LISTEN_GRACE;
            assert_eq!(router.poll_early(until - Duration::from_millis(1)), None);
            assert_eq!(router.poll_early(until), Some((2, early)));
        }
        assert_eq!(router.deadline(), None);
    }

    #[test]
    fn early_requests_are_limited_per_peer() {
        let (mut router, now) = (router(), Instant::now());
        let mut waits = |from, id| router.route(now, &packet(from, request(id))).is_none();
        for id in 0..MAX_EARLY_PER_PEER as u32 {
            assert!(waits(13, id));
        }
        assert!(!waits(13, 99), "the limit of the peer is reached");
        assert!((14..21).all(|from| (0..8).all(|id| waits(from, id))));
        assert!(!waits(21, 0), "the limit is reached");
        // A request that is retransmitted in a different datagram is only stored once.
        let mut again = packet(13, request(0));
        again.bytes[11] = 77;
        assert_eq!(router.route(now, &again), None);
        assert_eq!(router.early.len(), MAX_EARLY);
    }

    #[test]
    fn cancelled_request_is_not_delivered() {
        let (mut router, now) = (router(), Instant::now());
        for id in 1..3 {
            assert_eq!(router.route(now, &packet(23, request(id))), None);
        }
        assert_eq!(router.route(now, &packet(23, cancellation(1))), None);
        // A message from another host has no effect.
        assert_eq!(router.route(now, &packet(24, cancellation(2))), Some(2));
        let left = router.poll_early(now + LISTEN_GRACE);
        assert_eq!(left, Some((2, packet(23, request(2)))));
        assert_eq!(router.deadline(), None);
    }

    #[test]
    fn cancellation_reaches_process_of_request() {
        let (mut router, now) = (router(), Instant::now());
        listen(&mut router, 4);
        for (bytes, slot) in [
            (request(77), 4),
            (cancellation(77), 4),
            (cancellation(78), 2),
        ] {
            assert_eq!(router.route(now, &packet(9, bytes)), Some(slot));
        }
        // The process in this slot is a different one now.
        router.remove(4);
        router.add(4);
        assert_eq!(router.route(now, &packet(9, cancellation(77))), Some(2));
    }
}
