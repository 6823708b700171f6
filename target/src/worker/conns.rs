//! Connections of a worker for all fabrics. There is a single table, a list of connections to check
//! for actions, and a heap of timers.
//!
//! A connection has two identifiers. The key is an index into the table and can be reused, so it is
//! only used for completions and block operations, which are always complete before the connection
//! is removed. The serial number is unique, and is used for mail and timers, which can arrive at
//! any time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::SocketAddr;
use std::time::Instant;

use riser_transport::verbs::{CmId, CqId, QpId};
use rustc_hash::FxHashMap;
use slab::Slab;

use super::rdma::RdmaLink;
use crate::pool::{Owner, Pool};

/// Index into the connection table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ConnKey(pub(super) usize);

/// Maximum number of stale timers in the heap, in addition to one for each connection.
const FEW_TIMERS: usize = 16;

/// Fabric-specific part of a connection.
pub(super) trait Connection {
    /// Returns the queue pair, or `None` for TCP.
    fn rdma(&self) -> Option<&RdmaLink>;

    /// Same as [`Connection::rdma`], but mutable.
    fn rdma_mut(&mut self) -> Option<&mut RdmaLink>;

    /// Returns the next timeout.
    fn deadline(&self) -> Option<Instant>;

    /// Returns how often a unit had to wait for pool memory.
    fn pool_waits_begun(&self) -> u64;
}

/// Connection and its table state.
#[derive(Debug)]
pub(super) struct Conn<F> {
    serial: u64,
    pub(super) peer: SocketAddr,
    pub(super) fabric: F,
    /// Time of the current timer. This may be earlier than the deadline, but not later.
    timer: Option<Instant>,
    /// Number of pool waits at the last check.
    pool_waits_begun: u64,
    /// Set if we have requested a logout.
    is_leaving: bool,
    /// Set if the connection is in the list to check for actions.
    is_dirty: bool,
}

impl<F> Conn<F> {
    /// Returns the unique serial number.
    pub(super) fn serial(&self) -> u64 {
        self.serial
    }
}

/// Connections of a worker. The caller is responsible for limiting the number of connections.
#[derive(Debug)]
pub(super) struct Conns<F> {
    slab: Slab<Conn<F>>,
    // Index by serial number. Since we create these numbers, a peer can't cause hash collisions.
    by_serial: FxHashMap<u64, ConnKey>,
    by_cm: FxHashMap<(usize, CmId), ConnKey>,
    by_cq: FxHashMap<(usize, CqId), ConnKey>,
    next_serial: u64,
    /// Connections to check for actions. A key can be listed twice if it was reused.
    dirty: VecDeque<ConnKey>,
    /// Connections to check for completions, without duplicates.
    ready: VecDeque<ConnKey>,
    /// Timers with serial numbers. Only one timer per connection is valid, and we ignore all
    /// others; their number is limited by [`Conns::arm`]. A heap keeps its capacity, so unlike a
    /// tree, it does not have to allocate when a deadline is set for each command.
    timers: BinaryHeap<Reverse<(Instant, u64)>>,
}

impl<F> Default for Conns<F> {
    fn default() -> Self {
        Self {
            slab: Slab::new(),
            by_serial: FxHashMap::default(),
            by_cm: FxHashMap::default(),
            by_cq: FxHashMap::default(),
            next_serial: 0,
            dirty: VecDeque::new(),
            ready: VecDeque::new(),
            timers: BinaryHeap::new(),
        }
    }
}

impl<F: Connection> Conns<F> {
    /// Returns the serial number for a new connection. It has to be large enough that a peer can't
    /// cause an overflow by opening connections.
    pub(super) fn take_serial(&mut self) -> u64 {
        let serial = self.next_serial;
        self.next_serial += 1;
        serial
    }

    /// Adds a connection.
    pub(super) fn insert(&mut self, serial: u64, peer: SocketAddr, fabric: F) -> ConnKey {
        let names = fabric.rdma().map(RdmaLink::names);
        let key = ConnKey(self.slab.insert(Conn {
            serial,
            peer,
            fabric,
            timer: None,
            pool_waits_begun: 0,
            is_leaving: false,
            is_dirty: false,
        }));
        self.by_serial.insert(serial, key);
        if let Some((cm, cq)) = names {
            self.by_cm.insert(cm, key);
            self.by_cq.insert(cq, key);
        }
        key
    }

    /// Removes a connection. If there is still a timer in the heap, it will be ignored.
    ///
    /// # Panics
    /// Panics if there is no such connection.
    pub(super) fn remove(&mut self, key: ConnKey) -> Conn<F> {
        let conn = self.slab.remove(key.0);
        self.by_serial.remove(&conn.serial);
        if let Some((cm, cq)) = conn.fabric.rdma().map(RdmaLink::names) {
            self.by_cm.remove(&cm);
            self.by_cq.remove(&cq);
            // The key may soon be used for a new connection.
            self.ready.retain(|&ready| ready != key);
        }
        conn
    }

    pub(super) fn get(&self, key: ConnKey) -> Option<&Conn<F>> {
        self.slab.get(key.0)
    }

    pub(super) fn get_mut(&mut self, key: ConnKey) -> Option<&mut Conn<F>> {
        self.slab.get_mut(key.0)
    }

    pub(super) fn by_serial(&self, serial: u64) -> Option<ConnKey> {
        self.by_serial.get(&serial).copied()
    }

    pub(super) fn by_cm(&self, device: usize, cm: CmId) -> Option<ConnKey> {
        self.by_cm.get(&(device, cm)).copied()
    }

    pub(super) fn by_cq(&self, device: usize, cq: CqId) -> Option<ConnKey> {
        self.by_cq.get(&(device, cq)).copied()
    }

    /// Returns the connection for a queue pair. This is only used for rare events, so we don't need
    /// an index.
    pub(super) fn by_qp(&self, device: usize, qp: QpId) -> Option<ConnKey> {
        let mut conns = self.iter();
        let is_meant = |link: &RdmaLink| link.device == device && link.hardware.qp == qp;
        let found = conns.find(|(_, conn)| conn.fabric.rdma().is_some_and(is_meant));
        found.map(|(key, _)| key)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ConnKey, &Conn<F>)> {
        self.slab.iter().map(|(key, conn)| (ConnKey(key), conn))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (ConnKey, &mut Conn<F>)> {
        let conns = self.slab.iter_mut();
        conns.map(|(key, conn)| (ConnKey(key), conn))
    }

    /// Returns the keys of all matching connections, to be used when the loop has to change the
    /// table.
    pub(super) fn keys(&self, is_meant: impl Fn(&Conn<F>) -> bool) -> Vec<ConnKey> {
        let meant = self.iter().filter(|(_, conn)| is_meant(conn));
        meant.map(|(key, _)| key).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    /// Returns true if there is a connection using this device.
    pub(super) fn uses(&self, device: usize) -> bool {
        let is_there = |link: &RdmaLink| link.device == device;
        let mut conns = self.iter();
        conns.any(|(_, conn)| conn.fabric.rdma().is_some_and(is_there))
    }

    /// Adds a connection to the list to check for actions.
    pub(super) fn mark_dirty(&mut self, key: ConnKey) {
        let conn = self.get_mut(key);
        if conn.is_some_and(|conn| !std::mem::replace(&mut conn.is_dirty, true)) {
            self.dirty.push_back(key);
        }
    }

    /// Returns the next connection to check for actions.
    pub(super) fn next_dirty(&mut self) -> Option<ConnKey> {
        let key = self.dirty.pop_front()?;
        if let Some(conn) = self.get_mut(key) {
            conn.is_dirty = false;
        }
        Some(key)
    }

    /// Adds a connection to the list to check for completions.
    pub(super) fn mark_ready(&mut self, key: ConnKey) {
        let link = self.get_mut(key).and_then(|conn| conn.fabric.rdma_mut());
        if link.is_some_and(|link| !std::mem::replace(&mut link.is_ready, true)) {
            self.ready.push_back(key);
        }
    }

    /// Returns the number of connections to check for completions.
    pub(super) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Returns the next connection to check for completions, with its device and completion queue.
    pub(super) fn next_ready(&mut self) -> Option<(ConnKey, usize, CqId)> {
        let key = self.ready.pop_front()?;
        let link = self.get_mut(key)?.fabric.rdma_mut()?;
        link.is_ready = false;
        Some((key, link.device, link.hardware.cq))
    }

    /// Sets the timer of a connection to its deadline. If there is already an earlier timer, we
    /// keep it, so extending the deadline for each command is cheap.
    pub(super) fn arm(&mut self, key: ConnKey) {
        let Some(conn) = self.slab.get_mut(key.0) else {
            return;
        };
        let Some(at) = conn.fabric.deadline() else {
            return;
        };
        if conn.timer.is_some_and(|timer| timer <= at) {
            return;
        }
        conn.timer = Some(at);
        self.timers.push(Reverse((at, conn.serial)));
        // Remove stale timers if they use more than half of the heap. Otherwise they could
        // accumulate as peers connect and disconnect. On average, this only removes a few timers
        // per command.
        if self.timers.len() > 2 * self.slab.len() + FEW_TIMERS {
            let set = self.slab.iter().filter_map(|(_, conn)| {
                let at = conn.timer?;
                Some(Reverse((at, conn.serial)))
            });
            self.timers.clear();
            self.timers.extend(set);
        }
    }

    /// Returns the number of timers, including stale ones.
    pub(super) fn timers(&self) -> usize {
        self.timers.len()
    }

    /// Returns the time of the next timer, which may be stale.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.timers.peek().map(|Reverse((at, _))| *at)
    }

    /// Removes the next expired timer and returns its connection. The deadline may have changed
    /// since it was set.
    pub(super) fn take_timer(&mut self, now: Instant) -> Option<ConnKey> {
        while self.next_timer()? <= now {
            let Reverse((at, serial)) = self.timers.pop()?;
            let Some(key) = self.by_serial(serial) else {
                continue;
            };
            // A connection can have several entries in the heap, but only the last one is valid.
            let timer = &mut self.slab[key.0].timer;
            if timer.take_if(|set| *set == at).is_some() {
                return Some(key);
            }
        }
        None
    }

    /// Returns true if commands of this connection have started to wait for pool memory since the
    /// last call. This is counted for each unit, because a wait for a blocked disk may never end.
    pub(super) fn begins_to_wait(&mut self, key: ConnKey) -> bool {
        let Some(conn) = self.slab.get_mut(key.0) else {
            return false;
        };
        let begun = conn.fabric.pool_waits_begun();
        begun > std::mem::replace(&mut conn.pool_waits_begun, begun)
    }

    /// Adds all connections waiting for pool memory, in the order in which they should be served.
    pub(super) fn put_waiting(&self, pool: &Pool, waiting: &mut Vec<ConnKey>) {
        let known = pool
            .waiting()
            .filter_map(|Owner(serial)| self.by_serial(serial));
        waiting.extend(known);
    }

    /// Sets the flag for a requested logout. Returns true if it was not set before.
    pub(super) fn begin_leaving(&mut self, key: ConnKey) -> bool {
        let conn = self.get_mut(key);
        conn.is_some_and(|conn| !std::mem::replace(&mut conn.is_leaving, true))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::Protocol;

    /// Connection without a transport.
    struct Fake {
        protocol: Protocol,
        deadline: Option<Instant>,
        waits: u64,
    }

    impl Connection for Fake {
        fn rdma(&self) -> Option<&RdmaLink> {
            None
        }

        fn rdma_mut(&mut self) -> Option<&mut RdmaLink> {
            None
        }

        fn deadline(&self) -> Option<Instant> {
            self.deadline
        }

        fn pool_waits_begun(&self) -> u64 {
            self.waits
        }
    }

    fn insert(conns: &mut Conns<Fake>, protocol: Protocol) -> (u64, ConnKey) {
        let serial = conns.take_serial();
        let peer = SocketAddr::from(([10, 0, 0, 1], 1024));
        let fake = Fake {
            protocol,
            deadline: None,
            waits: 0,
        };
        (serial, conns.insert(serial, peer, fake))
    }

    #[test]
    fn connection_is_found_by_number_until_removed() {
        let mut conns = Conns::default();
        let all: Vec<_> = [Protocol::Srp, Protocol::Iscsi, Protocol::Iser]
            .into_iter()
            .map(|protocol| insert(&mut conns, protocol))
            .collect();
        for (serial, key) in &all {
            assert_eq!(conns.by_serial(*serial), Some(*key));
            assert_eq!(conns.get(*key).map(Conn::serial), Some(*serial));
        }
        let (serial, key) = all[1];
        assert_eq!(conns.remove(key).serial(), serial);
        assert!(conns.by_serial(serial).is_none() && conns.get(key).is_none());
        let (successor, same) = insert(&mut conns, Protocol::Srp);
        assert_eq!(same, key, "a key is used again");
        assert_ne!(successor, serial, "a number never is");
        assert_eq!(conns.by_serial(serial), None);
    }

    fn arm(conns: &mut Conns<Fake>, key: ConnKey, at: Instant) {
        conns.get_mut(key).unwrap().fabric.deadline = Some(at);
        conns.arm(key);
    }

    #[test]
    fn timer_of_removed_connection_does_not_fire() {
        let mut conns = Conns::default();
        let due = Instant::now() + Duration::from_secs(1);
        let later = due + Duration::from_secs(1);
        let (_, first) = insert(&mut conns, Protocol::Srp);
        arm(&mut conns, first, due);
        conns.remove(first);
        let (_, second) = insert(&mut conns, Protocol::Iser);
        assert_eq!(second, first);
        arm(&mut conns, second, later);
        assert_eq!(conns.take_timer(due), None);
        assert_eq!(conns.take_timer(later), Some(second));
        assert_eq!(conns.next_timer(), None);
    }

    #[test]
    fn removed_connections_leave_few_timers() {
        let mut conns = Conns::default();
        let due = Instant::now() + Duration::from_secs(30);
        let (_, stays) = insert(&mut conns, Protocol::Srp);
        arm(&mut conns, stays, due);
        for _ in 0..1000 {
            let (_, key) = insert(&mut conns, Protocol::Iscsi);
            arm(&mut conns, key, due);
            conns.remove(key);
            assert!(
                conns.timers.len() <= FEW_TIMERS + 4,
                "{}",
                conns.timers.len()
            );
        }
        assert_eq!(conns.take_timer(due), Some(stays));
        assert_eq!(conns.take_timer(due), None);
    }

    /// Commands have to wait one millisecond for a rate limit, and the session has its own
    /// deadline: either a ping that is delayed by each command, or a constant time.
    #[test]
    fn changing_deadline_leaves_few_timers() {
        for is_put_off in [true, false] {
            let mut conns = Conns::default();
            let mut now = Instant::now();
            let (wait, far) = (Duration::from_millis(1), Duration::from_secs(15));
            let (_, key) = insert(&mut conns, Protocol::Iscsi);
            let mut last = now + far;
            for _ in 0..1000 {
                if is_put_off {
                    last = now + far;
                }
                arm(&mut conns, key, last);
                arm(&mut conns, key, now + wait);
                // When the deadline is extended, the previous timer stays and will find the new
                // deadline.
                arm(&mut conns, key, last);
                let timers = conns.timers.len();
                assert!(timers <= FEW_TIMERS + 2, "{timers}");
                assert_eq!(conns.take_timer(now + wait / 2), None);
                now += wait;
                assert_eq!(conns.take_timer(now), Some(key));
                assert_eq!(conns.take_timer(now), None);
            }
            arm(&mut conns, key, last);
            assert_eq!(conns.take_timer(last), Some(key));
            assert_eq!(conns.take_timer(last), None);
        }
    }

    #[test]
    fn wait_for_second_unit_is_noticed() {
        let mut conns = Conns::default();
        let (_, key) = insert(&mut conns, Protocol::Srp);
        let mut begin = |waits| {
            conns.get_mut(key).unwrap().fabric.waits += waits;
            conns.begins_to_wait(key)
        };
        assert!(begin(1));
        assert!(!begin(0));
        assert!(begin(1), "the first one hangs");
        assert!(!begin(0));
    }

    #[test]
    fn memory_waits_have_common_order() {
        let mut conns = Conns::default();
        let mut pool = Pool::new(1 << 20).unwrap();
        let order = [
            Protocol::Iser,
            Protocol::Srp,
            Protocol::Iscsi,
            Protocol::Srp,
            Protocol::Iser,
        ];
        for protocol in order {
            let (serial, key) = insert(&mut conns, protocol);
            conns.get_mut(key).unwrap().fabric.waits = 1;
            assert!(conns.begins_to_wait(key) && !conns.begins_to_wait(key));
            pool.wait(Owner(serial));
        }
        let line = |conns: &Conns<Fake>, pool: &Pool| {
            let mut waiting = Vec::new();
            conns.put_waiting(pool, &mut waiting);
            let protocols = waiting.iter().map(|key| conns.get(*key).unwrap());
            protocols
                .map(|conn| conn.fabric.protocol)
                .collect::<Vec<_>>()
        };
        assert_eq!(line(&conns, &pool), order);
        // The first connection has received its memory and needs more, so it should be last now.
        pool.leave_line(Owner(0));
        pool.wait(Owner(0));
        assert_eq!(
            line(&conns, &pool)[..2],
            [Protocol::Srp, Protocol::Iscsi],
            "the others are next"
        );
        // A removed connection should be ignored.
        let srp = conns.by_serial(1).unwrap();
        conns.remove(srp);
        assert_eq!(line(&conns, &pool)[0], Protocol::Iscsi);
    }
}
