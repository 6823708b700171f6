//! The connections of a worker, of all fabrics: one table, one list of those that may want
//! something, one heap of timers.
//!
//! A connection has two names. Its key is its place in the table, which another connection may have
//! after it: completions and block operations carry it, which all end before their connection does.
//! Its serial number is never used twice: mail and timers carry it, which may come late.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::SocketAddr;
use std::time::Instant;

use riser_transport::verbs::{CmId, CqId, QpId};
use rustc_hash::FxHashMap;
use slab::Slab;

use super::rdma::RdmaLink;
use crate::pool::{Owner, Pool};

/// Place of a connection in its worker's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ConnKey(pub(super) usize);

/// Timers that may stay in the heap though they count no longer, besides one for each connection.
const FEW_TIMERS: usize = 16;

/// The part of a connection that is its fabric's, as the table sees it.
pub(super) trait Connection {
    /// Its queue pair, unless it is on TCP.
    fn rdma(&self) -> Option<&RdmaLink>;

    /// As [`Connection::rdma`], for changes.
    fn rdma_mut(&mut self) -> Option<&mut RdmaLink>;

    /// Returns the time at which it wants to be called without anything happening.
    fn deadline(&self) -> Option<Instant>;

    /// Whether commands of it wait for pool memory.
    fn waits_for_pool(&self) -> bool;
}

/// A connection, with what the table keeps of each.
#[derive(Debug)]
pub(super) struct Conn<F> {
    serial: u64,
    pub(super) peer: SocketAddr,
    pub(super) fabric: F,
    /// Time at which its timer fires, if one is set: at the deadline or earlier, never later.
    timer: Option<Instant>,
    /// Whether it waited for pool memory when it was last looked at.
    waits_for_pool: bool,
    /// The initiator was asked to log out.
    is_leaving: bool,
    /// It is in the list of those that may ask for something.
    is_dirty: bool,
}

impl<F> Conn<F> {
    /// Number of the connection, never used twice.
    pub(super) fn serial(&self) -> u64 {
        self.serial
    }
}

/// The connections of a worker. Their number is bounded by those who insert them.
#[derive(Debug)]
pub(super) struct Conns<F> {
    slab: Slab<Conn<F>>,
    // By numbers of ours: no peer can choose them for their hashes.
    by_serial: FxHashMap<u64, ConnKey>,
    by_cm: FxHashMap<(usize, CmId), ConnKey>,
    by_cq: FxHashMap<(usize, CqId), ConnKey>,
    next_serial: u64,
    /// Connections that may ask for something; each once, or twice where its key was another's.
    dirty: VecDeque<ConnKey>,
    /// Connections whose completion queue may have completions; each once.
    ready: VecDeque<ConnKey>,
    /// Timers with the serial numbers of their connections. One of each connection counts, and
    /// others are passed over; [`Conns::arm`] bounds their number. A heap keeps its room, so it
    /// does not allocate for a deadline that comes and goes with every command, as a tree would.
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
    /// Returns the number of a new connection. Peers make connections, so it is of a width that
    /// they cannot exhaust.
    pub(super) fn take_serial(&mut self) -> u64 {
        let serial = self.next_serial;
        self.next_serial += 1;
        serial
    }

    /// Enters a connection under all of its names.
    pub(super) fn insert(&mut self, serial: u64, peer: SocketAddr, fabric: F) -> ConnKey {
        let names = fabric.rdma().map(RdmaLink::names);
        let key = ConnKey(self.slab.insert(Conn {
            serial,
            peer,
            fabric,
            timer: None,
            waits_for_pool: false,
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

    /// Removes a connection from all tables. A timer of it that stays in the heap is passed over.
    ///
    /// # Panics
    /// Without such a connection.
    pub(super) fn remove(&mut self, key: ConnKey) -> Conn<F> {
        let conn = self.slab.remove(key.0);
        self.by_serial.remove(&conn.serial);
        if let Some((cm, cq)) = conn.fabric.rdma().map(RdmaLink::names) {
            self.by_cm.remove(&cm);
            self.by_cq.remove(&cq);
            // The key may be the next connection's soon.
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

    /// Returns the connection with a queue pair. Only rare events name one, so there is no table.
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

    /// Returns the keys of the connections that are meant, for a loop that changes the table.
    pub(super) fn keys(&self, is_meant: impl Fn(&Conn<F>) -> bool) -> Vec<ConnKey> {
        let meant = self.iter().filter(|(_, conn)| is_meant(conn));
        meant.map(|(key, _)| key).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    /// Whether a connection is on a device.
    pub(super) fn uses(&self, device: usize) -> bool {
        let is_there = |link: &RdmaLink| link.device == device;
        let mut conns = self.iter();
        conns.any(|(_, conn)| conn.fabric.rdma().is_some_and(is_there))
    }

    /// Notes that a connection may ask for something.
    pub(super) fn mark_dirty(&mut self, key: ConnKey) {
        let conn = self.get_mut(key);
        if conn.is_some_and(|conn| !std::mem::replace(&mut conn.is_dirty, true)) {
            self.dirty.push_back(key);
        }
    }

    /// Takes the next connection that may ask for something.
    pub(super) fn next_dirty(&mut self) -> Option<ConnKey> {
        let key = self.dirty.pop_front()?;
        if let Some(conn) = self.get_mut(key) {
            conn.is_dirty = false;
        }
        Some(key)
    }

    /// Notes that the completion queue of a connection may have something.
    pub(super) fn mark_ready(&mut self, key: ConnKey) {
        let link = self.get_mut(key).and_then(|conn| conn.fabric.rdma_mut());
        if link.is_some_and(|link| !std::mem::replace(&mut link.is_ready, true)) {
            self.ready.push_back(key);
        }
    }

    /// Connections whose completion queues may have something.
    pub(super) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Takes the next of them, with its device and its completion queue.
    pub(super) fn next_ready(&mut self) -> Option<(ConnKey, usize, CqId)> {
        let key = self.ready.pop_front()?;
        let link = self.get_mut(key)?.fabric.rdma_mut()?;
        link.is_ready = false;
        Some((key, link.device, link.hardware.cq))
    }

    /// Sets the timer of a connection for its deadline, unless it fires earlier anyhow: a deadline
    /// that is put off with every command costs nothing here.
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
        // Timers that count no longer make room when they are the greater part, so that peers who
        // come and go do not leave one each until its time, and a command pays for a few at most.
        if self.timers.len() > 2 * self.slab.len() + FEW_TIMERS {
            let set = self.slab.iter().filter_map(|(_, conn)| {
                let at = conn.timer?;
                Some(Reverse((at, conn.serial)))
            });
            self.timers.clear();
            self.timers.extend(set);
        }
    }

    /// Returns the number of timers, including cancelled ones.
    pub(super) fn timers(&self) -> usize {
        self.timers.len()
    }

    /// Returns the time of the next timer, which may be a cancelled one.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.timers.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes a timer that is due, and with it the connection whose deadline may have come.
    pub(super) fn take_timer(&mut self, now: Instant) -> Option<ConnKey> {
        while self.next_timer()? <= now {
            let Reverse((at, serial)) = self.timers.pop()?;
            let Some(key) = self.by_serial(serial) else {
                continue;
            };
            // A connection may have further entries in the heap; only the one that is set counts.
            let timer = &mut self.slab[key.0].timer;
            if timer.take_if(|set| *set == at).is_some() {
                return Some(key);
            }
        }
        None
    }

    /// Whether a connection has begun to wait for pool memory since this was asked last.
    pub(super) fn begins_to_wait(&mut self, key: ConnKey) -> bool {
        let Some(conn) = self.slab.get_mut(key.0) else {
            return false;
        };
        let waits = conn.fabric.waits_for_pool();
        let has_waited = std::mem::replace(&mut conn.waits_for_pool, waits);
        waits && !has_waited
    }

    /// Appends the connections that wait for pool memory, of all fabrics in one order: the one
    /// whose turn it is comes first.
    pub(super) fn put_waiting(&self, pool: &Pool, waiting: &mut Vec<ConnKey>) {
        let known = pool
            .waiting()
            .filter_map(|Owner(serial)| self.by_serial(serial));
        waiting.extend(known);
    }

    /// Notes that the initiator of a connection is asked to log out; whether it was not before.
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

    /// A connection of some fabric, without a wire.
    struct Fake {
        protocol: Protocol,
        deadline: Option<Instant>,
        waits: bool,
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

        fn waits_for_pool(&self) -> bool {
            self.waits
        }
    }

    fn enter(conns: &mut Conns<Fake>, protocol: Protocol) -> (u64, ConnKey) {
        let serial = conns.take_serial();
        let peer = SocketAddr::from(([10, 0, 0, 1], 1024));
        let fake = Fake {
            protocol,
            deadline: None,
            waits: false,
        };
        (serial, conns.insert(serial, peer, fake))
    }

    #[test]
    fn a_connection_is_found_by_its_number_while_it_is_there() {
        let mut conns = Conns::default();
        let all: Vec<_> = [Protocol::Srp, Protocol::Iscsi, Protocol::Iser]
            .into_iter()
            .map(|protocol| enter(&mut conns, protocol))
            .collect();
        for (serial, key) in &all {
            assert_eq!(conns.by_serial(*serial), Some(*key));
            assert_eq!(conns.get(*key).map(Conn::serial), Some(*serial));
        }
        let (serial, key) = all[1];
        assert_eq!(conns.remove(key).serial(), serial);
        assert!(conns.by_serial(serial).is_none() && conns.get(key).is_none());
        let (successor, same) = enter(&mut conns, Protocol::Srp);
        assert_eq!(same, key, "a key is used again");
        assert_ne!(successor, serial, "a number never is");
        assert_eq!(conns.by_serial(serial), None);
    }

    fn arm(conns: &mut Conns<Fake>, key: ConnKey, at: Instant) {
        conns.get_mut(key).unwrap().fabric.deadline = Some(at);
        conns.arm(key);
    }

    #[test]
    fn a_timer_of_a_connection_that_is_gone_does_not_fire_for_its_successor() {
        let mut conns = Conns::default();
        let due = Instant::now() + Duration::from_secs(1);
        let later = due + Duration::from_secs(1);
        let (_, first) = enter(&mut conns, Protocol::Srp);
        arm(&mut conns, first, due);
        conns.remove(first);
        let (_, second) = enter(&mut conns, Protocol::Iser);
        assert_eq!(second, first);
        arm(&mut conns, second, later);
        assert_eq!(conns.take_timer(due), None);
        assert_eq!(conns.take_timer(later), Some(second));
        assert_eq!(conns.next_timer(), None);
    }

    #[test]
    fn connections_that_come_and_go_leave_few_timers() {
        let mut conns = Conns::default();
        let due = Instant::now() + Duration::from_secs(30);
        let (_, stays) = enter(&mut conns, Protocol::Srp);
        arm(&mut conns, stays, due);
        for _ in 0..1000 {
            let (_, key) = enter(&mut conns, Protocol::Iscsi);
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

    /// A command at a time waits a millisecond for its limit, while the session has a deadline of
    /// its own: a ping that each command puts off, or a time that stays the same.
    #[test]
    fn a_deadline_that_comes_and_goes_leaves_few_timers() {
        for is_put_off in [true, false] {
            let mut conns = Conns::default();
            let mut now = Instant::now();
            let (wait, far) = (Duration::from_millis(1), Duration::from_secs(15));
            let (_, key) = enter(&mut conns, Protocol::Iscsi);
            let mut last = now + far;
            for _ in 0..1000 {
                if is_put_off {
                    last = now + far;
                }
                arm(&mut conns, key, last);
                arm(&mut conns, key, now + wait);
                // A deadline that is put off leaves its timer, which finds that out.
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
    fn connections_of_all_fabrics_wait_for_memory_in_one_order() {
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
            let (serial, key) = enter(&mut conns, protocol);
            conns.get_mut(key).unwrap().fabric.waits = true;
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
        // The first has got its memory, and waits for more: it is the last one then.
        pool.leave_line(Owner(0));
        pool.wait(Owner(0));
        assert_eq!(
            line(&conns, &pool)[..2],
            [Protocol::Srp, Protocol::Iscsi],
            "the others are next"
        );
        // One that is gone is passed over.
        let srp = conns.by_serial(1).unwrap();
        conns.remove(srp);
        assert_eq!(line(&conns, &pool)[0], Protocol::Iscsi);
    }
}
