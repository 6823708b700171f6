//! A datagram socket: a UDP socket, and a queue pair on each device from which it has sent.
//!
//! The UDP socket has the port; by it two ends learn each other's queue pairs (see
//! `datagram_wire`). The calls of the program drive both: no thread is needed.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::io::IoSlice;
use std::mem::zeroed;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::ptr;

use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::SockAddr;
use riser_transport::verbs::{GRH_LEN, Gid};

use super::connection::AGAIN;
use super::datagram_wire::{Header, MAX_HEADER, Op, UdpHeader};
use super::ident::checked;
use super::options::{Defaults, Options};
use super::queue::{Buffer, Completions, drain};
use super::stream::LOW_WATER;
use crate::address::{ibv_create_ah, ibv_destroy_ah};
use crate::cm::{device_at, device_towards, shared};
use crate::devices::Device;
use crate::errno::Errno;
use crate::post::{post_recv, post_send};
use crate::qp::{ibv_create_qp, ibv_destroy_qp, ibv_modify_qp};

/// Bytes of a datagram with its header.
const SLOT: usize = LOW_WATER as usize;

/// Bytes of the route header that is before each datagram received (IBTA 11.4.1.2).
const GRH: usize = GRH_LEN;

/// Key of the queue pairs, which is that of the connection manager's datagrams.
const QKEY: u32 = 0x0123_4567;

/// Marks the identifier of a receive.
const RECEIVE: u64 = 1 << 63;

/// Most receivers whose queue pairs are known. The table is emptied when it is full; those that matter
/// are asked again.
const MAX_DESTS: usize = 4096;

/// UDP datagrams that are taken at a time.
const BATCH: usize = 32;

/// A datagram socket.
pub(super) struct Datagram {
    /// Before the ends, to whose protection domains they belong.
    dests: HashMap<SocketAddr, Dest>,
    ends: Vec<End>,
    udp: UdpSocket,
    pub(super) options: Options,
    /// Set by `rconnect`.
    pub(super) peer: Option<SocketAddr>,
    /// Datagrams that the program has not received, and their senders.
    received: VecDeque<(SocketAddr, Vec<u8>)>,
}

/// A receiver.
struct Dest {
    /// Index of the end that sends to it.
    end: usize,
    /// Its queue pair, once that is known.
    route: Option<Route>,
    trust: Trust,
}

/// How far the queue pair of a receiver can be relied on.
///
/// Anyone can forge a UDP datagram of the receiver's. So only the answer to a datagram that was sent to
/// it names its queue pair. Another that names a different one may be forged, or from a program that
/// has begun again: the next datagram goes by UDP, arrives in either case, and is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Trust {
    /// A datagram was sent by UDP that has not been answered.
    is_asked: bool,
    /// A datagram has named another queue pair than the one that is known.
    is_in_doubt: bool,
}

impl Trust {
    /// Takes a datagram that names a queue pair, or the known one. Answers whether its queue pair is
    /// the receiver's from now on.
    fn handle(&mut self, op: Op, is_known: bool) -> bool {
        if op == Op::Control && self.is_asked {
            *self = Self::default();
            return true;
        }
        self.is_in_doubt |= !is_known;
        false
    }
}

/// The way to a queue pair.
struct Route {
    ah: *mut ibv_ah,
    qpn: u32,
}

// SAFETY: the library's calls may be made in any thread.
unsafe impl Send for Route {}

impl Drop for Route {
    fn drop(&mut self) {
        // SAFETY: the handle is alive, and no one else has it.
        unsafe { ibv_destroy_ah(self.ah) };
    }
}

/// A queue pair on a device.
struct End {
    device: &'static Device,
    qp: *mut ibv_qp,
    completions: Completions,
    send: Buffer,
    recv: Buffer,
    /// Slots of the send buffer that are free, of so many.
    free: Vec<u32>,
    slots: u32,
    header: Header,
}

// SAFETY: the library's calls may be made in any thread.
unsafe impl Send for End {}

impl End {
    /// Makes a queue pair that can send and receive.
    fn new(device: &'static Device, options: &Options, port: u16) -> Result<Self, Errno> {
        let sizes = options.sizes();
        let count = |queue: u16, bytes: u32| u32::from(queue).min(bytes / SLOT as u32).max(1);
        let slots = count(sizes.send_queue, sizes.send_buffer);
        let receives = count(sizes.recv_queue, sizes.recv_buffer);
        let shared = shared(device)?;
        let pd = shared.pd.handle();
        // SAFETY: the device's shared context and protection domain stay open.
        let (completions, send, recv) = unsafe {
            (
                Completions::new(shared.context.handle(), slots + receives)?,
                Buffer::new(pd, slots as usize * SLOT, IBV_ACCESS_LOCAL_WRITE)?,
                Buffer::new(pd, receives as usize * (GRH + SLOT), IBV_ACCESS_LOCAL_WRITE)?,
            )
        };
        // SAFETY: all-zero bytes are valid for this plain C structure.
        let mut attr: ibv_qp_init_attr = unsafe { zeroed() };
        attr.send_cq = completions.cq();
        attr.recv_cq = completions.cq();
        attr.qp_type = IBV_QPT_UD;
        attr.sq_sig_all = 1;
        attr.cap.max_send_wr = slots;
        attr.cap.max_recv_wr = receives;
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        // SAFETY: the protection domain is alive, and so are the attributes.
        let qp = unsafe { ibv_create_qp(pd, &raw mut attr) };
        if qp.is_null() {
            return Err(Errno::last());
        }
        let end = Self {
            device,
            qp,
            completions,
            send,
            recv,
            free: (0..slots).collect(),
            slots,
            header: Header(SocketAddr::new(device.config.addr, port)),
        };
        end.start()?;
        for slot in 0..receives {
            end.post_recv(slot)?;
        }
        // The program may wait for its first datagram.
        end.completions.arm();
        Ok(end)
    }

    /// Brings the queue pair to the state in which it sends.
    fn start(&self) -> Result<(), Errno> {
        // SAFETY: all-zero bytes are valid for this plain C structure.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        attr.port_num = 1;
        attr.qkey = QKEY;
        let steps = [
            (IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
            (IBV_QPS_RTR, 0),
            (IBV_QPS_RTS, IBV_QP_SQ_PSN),
        ];
        for (state, mask) in steps {
            attr.qp_state = state;
            let mask = (mask | IBV_QP_STATE) as c_int;
            // SAFETY: the queue pair is alive, and so are the attributes.
            match unsafe { ibv_modify_qp(self.qp, &raw mut attr, mask) } {
                0 => {}
                errno => return Err(Errno(errno)),
            }
        }
        Ok(())
    }

    fn qpn(&self) -> u32 {
        // SAFETY: the queue pair is alive.
        unsafe { (*self.qp).qp_num }
    }

    fn post_recv(&self, slot: u32) -> Result<(), Errno> {
        let at = u64::from(slot) * (GRH + SLOT) as u64;
        let mut sge = ibv_sge {
            addr: self.recv.memory().addr() + at,
            length: (GRH + SLOT) as u32,
            lkey: self.recv.lkey(),
        };
        // SAFETY: all-zero bytes are valid for this plain C structure.
        let mut wr: ibv_recv_wr = unsafe { zeroed() };
        wr.wr_id = RECEIVE | u64::from(slot);
        wr.sg_list = &raw mut sge;
        wr.num_sge = 1;
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive, and so are the request and its memory.
        match unsafe { post_recv(self.qp, &raw mut wr, &raw mut bad) } {
            0 => Ok(()),
            errno => Err(Errno(errno)),
        }
    }

    /// Sends a datagram behind our header.
    fn send(&mut self, bytes: &[u8], route: &Route) -> Result<(), Errno> {
        let slot = self.free.pop().ok_or(AGAIN)?;
        let at = slot as usize * SLOT;
        let header = self.header.encode();
        self.send.memory().write(at, &header);
        self.send.memory().write(at + header.len(), bytes);
        let mut sge = ibv_sge {
            addr: self.send.memory().addr() + at as u64,
            length: (header.len() + bytes.len()) as u32,
            lkey: self.send.lkey(),
        };
        // SAFETY: all-zero bytes are valid for this plain C structure.
        let mut wr: ibv_send_wr = unsafe { zeroed() };
        wr.wr_id = slot.into();
        wr.sg_list = &raw mut sge;
        wr.num_sge = 1;
        wr.opcode = IBV_WR_SEND;
        wr.wr.ud.ah = route.ah;
        wr.wr.ud.remote_qpn = route.qpn;
        wr.wr.ud.remote_qkey = QKEY;
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive, and so are the request and its memory.
        match unsafe { post_send(self.qp, &raw mut wr, &raw mut bad) } {
            0 => Ok(()),
            errno => {
                self.free.push(slot);
                Err(Errno(errno))
            }
        }
    }

    /// Takes the completions that have come. Answers whether there were any.
    fn progress(&mut self, mut receive: impl FnMut(SocketAddr, &[u8])) -> bool {
        drain(self.completions.entries(), || {
            let mut used = Vec::new();
            let (free, recv) = (&mut self.free, self.recv.memory());
            let n = self.completions.poll(|wc| {
                let slot = wc.wr_id as u32;
                if wc.wr_id & RECEIVE == 0 {
                    free.push(slot);
                    return;
                }
                used.push(slot);
                let length = (wc.byte_len as usize).min(GRH + SLOT);
                if wc.status == IBV_WC_SUCCESS {
                    let mut bytes = [0; GRH + SLOT];
                    let at = slot as usize * (GRH + SLOT);
                    recv.read(at, &mut bytes[..length]);
                    if let Some((Header(from), data)) = Header::decode_received(&bytes[..length]) {
                        receive(from, data);
                    }
                }
            });
            for slot in used {
                // It fails only where the queue pair does, which then receives nothing more.
                let _ = self.post_recv(slot);
            }
            n
        })
    }

    /// The way to a queue pair at an address.
    fn route(&self, ip: IpAddr, qpn: u32) -> Result<Route, Errno> {
        // SAFETY: all-zero bytes are valid for this plain C structure.
        let mut attr: ibv_ah_attr = unsafe { zeroed() };
        attr.is_global = 1;
        attr.port_num = 1;
        attr.grh.hop_limit = 64;
        attr.grh.dgid = ibv_gid {
            raw: Gid::from(ip).0,
        };
        // SAFETY: the queue pair and its protection domain are alive, and so are the attributes.
        let ah = unsafe { ibv_create_ah((*self.qp).pd, &raw mut attr) };
        if ah.is_null() {
            return Err(Errno::last());
        }
        Ok(Route { ah, qpn })
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // SAFETY: the queue pair is alive, and no one else has it. Its memory goes after it.
        unsafe { ibv_destroy_qp(self.qp) };
    }
}

impl Datagram {
    /// A new socket.
    ///
    /// # Errors
    /// Those of `socket(2)`.
    pub(super) fn new(domain: c_int) -> Result<Self, Errno> {
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: the call may be made at any time; the descriptor that it makes is ours.
        let udp = unsafe {
            let fd = libc::socket(domain, kind, 0);
            if fd < 0 {
                return Err(Errno::last());
            }
            <UdpSocket as std::os::fd::FromRawFd>::from_raw_fd(fd)
        };
        Ok(Self {
            dests: HashMap::new(),
            ends: Vec::new(),
            udp,
            options: Options::new(&Defaults::get()),
            peer: None,
            received: VecDeque::new(),
        })
    }

    /// Descriptor of the UDP socket.
    pub(super) fn fd(&self) -> c_int {
        self.udp.as_raw_fd()
    }

    /// Sizes are still open: no queue pair has them.
    pub(super) fn is_open_to_sizes(&self) -> bool {
        self.ends.is_empty()
    }

    /// `rbind`.
    ///
    /// # Errors
    /// Those of `bind(2)`.
    pub(super) fn bind(&self, addr: SocketAddr) -> Result<(), Errno> {
        let length = address_length(addr);
        let mut addr = SockAddr::new(addr);
        // SAFETY: the address is alive and has that length.
        checked(unsafe { libc::bind(self.fd(), addr.as_mut_ptr().cast(), length) })
    }

    /// `rconnect`: sends to one peer from now on.
    ///
    /// # Errors
    /// Those of [`Self::prepare`] and of `connect(2)`.
    pub(super) fn connect(&mut self, peer: SocketAddr) -> Result<(), Errno> {
        self.prepare(peer)?;
        // Other sockets of its address and port get what is from others. A socket without an address
        // keeps to none: connecting it would choose one that no device has.
        if !self.udp.local_addr()?.ip().is_unspecified() {
            self.udp.connect(peer)?;
        }
        self.peer = Some(peer);
        Ok(())
    }

    /// Sets an option of the UDP socket.
    ///
    /// # Errors
    /// Those of `setsockopt(2)`.
    ///
    /// # Safety
    /// The pointer is null, or the value has that length.
    pub(super) unsafe fn set_option(
        &self,
        (level, name): (c_int, c_int),
        value: *const c_void,
        length: socklen_t,
    ) -> Result<(), Errno> {
        // SAFETY: as the caller promises.
        checked(unsafe { libc::setsockopt(self.fd(), level, name, value, length) })
    }

    /// Address of the UDP socket.
    ///
    /// # Errors
    /// Those of `getsockname(2)`.
    pub(super) fn local_addr(&self) -> Result<SocketAddr, Errno> {
        Ok(self.udp.local_addr()?)
    }

    /// The end that sends to an address, which is made where there is none on that device. The UDP
    /// socket gets a port where it has none: the receiver sees it.
    fn end_towards(&mut self, to: SocketAddr) -> Result<usize, Errno> {
        let mut local = self.udp.local_addr()?;
        if local.port() == 0 {
            self.bind(local)?;
            local = self.udp.local_addr()?;
        }
        let device = match device_at(local.ip()) {
            Some(device) => device,
            None => device_towards(to)?,
        };
        let known = self.ends.iter().position(|e| ptr::eq(e.device, device));
        if let Some(known) = known {
            return Ok(known);
        }
        let end = End::new(device, &self.options, local.port())?;
        self.ends.push(end);
        Ok(self.ends.len() - 1)
    }

    /// Makes a receiver known, so that the first datagram to it finds an end.
    ///
    /// # Errors
    /// Those of making a queue pair; `ENODEV` without a device.
    pub(super) fn prepare(&mut self, to: SocketAddr) -> Result<(), Errno> {
        if self.dests.contains_key(&to) {
            return Ok(());
        }
        let end = self.end_towards(to)?;
        if self.dests.len() == MAX_DESTS {
            self.dests.clear();
        }
        let dest = Dest {
            end,
            route: None,
            trust: Trust::default(),
        };
        self.dests.insert(to, dest);
        Ok(())
    }

    /// Sends a datagram.
    ///
    /// # Errors
    /// `EMSGSIZE`, `EAGAIN` without a free slot, those of [`Self::prepare`] and of `sendmsg(2)`.
    pub(super) fn send(&mut self, bytes: &[u8], to: SocketAddr) -> Result<(), Errno> {
        if bytes.len() > SLOT - MAX_HEADER {
            return Err(Errno(libc::EMSGSIZE));
        }
        self.prepare(to)?;
        let dest = &self.dests[&to];
        if dest.route.is_none() || dest.trust.is_in_doubt || self.ends[dest.end].free.is_empty() {
            // The answer to an earlier datagram may have come, or a slot may be free.
            self.progress();
            self.prepare(to)?;
        }
        let Some(dest) = self.dests.get_mut(&to) else {
            return Err(AGAIN);
        };
        let end = dest.end;
        match &dest.route {
            Some(route) if !dest.trust.is_in_doubt => self.ends[end].send(bytes, route),
            _ => {
                dest.trust.is_asked = true;
                self.send_udp(end, bytes, to, Op::Data)
            }
        }
    }

    /// Sends by UDP, from the address of the end's device: the receiver takes it for that of the
    /// queue pair.
    fn send_udp(&self, end: usize, bytes: &[u8], to: SocketAddr, op: Op) -> Result<(), Errno> {
        let end = &self.ends[end];
        let addr = end.device.config.addr;
        let header = UdpHeader {
            op,
            qpn: end.qpn(),
            addr,
        };
        send_from(&self.udp, addr, to, &[&header.encode(), bytes])
    }

    /// Takes what has come. Answers whether there was anything.
    pub(super) fn progress(&mut self) -> bool {
        let room = usize::from(self.options.sizes().recv_queue);
        let received = &mut self.received;
        let mut is_changed = false;
        for end in &mut self.ends {
            is_changed |= end.progress(|from, data| {
                // Datagrams for which there is no room are lost.
                if received.len() < room {
                    received.push_back((from, data.to_vec()));
                }
            });
        }
        let mut bytes = [0; SLOT];
        for _ in 0..BATCH {
            // Its errors are those of datagrams sent before, which may be lost.
            let Ok((length, from)) = self.udp.recv_from(&mut bytes) else {
                break;
            };
            is_changed = true;
            if let Some((header, data)) = UdpHeader::decode(&bytes[..length]) {
                self.handle_udp(header, data, from, room);
            }
        }
        is_changed
    }

    fn handle_udp(&mut self, header: UdpHeader, data: &[u8], from: SocketAddr, room: usize) {
        if header.op == Op::Data {
            // A stranger gets no place among the receivers.
            let Ok(end) = self.end_towards(from) else {
                return;
            };
            // Where it gets lost, the sender's next datagram comes by UDP as well.
            let _ = self.send_udp(end, &[], from, Op::Control);
            if self.received.len() < room {
                self.received.push_back((from, data.to_vec()));
            }
        }
        let Some(dest) = self.dests.get_mut(&from) else {
            return;
        };
        let is_known = dest.route.as_ref().is_some_and(|r| r.qpn == header.qpn);
        if dest.trust.handle(header.op, is_known) && !is_known {
            dest.route = self.ends[dest.end].route(from.ip(), header.qpn).ok();
        }
    }

    /// Next datagram, with its sender.
    ///
    /// # Errors
    /// `EAGAIN` where there is none.
    pub(super) fn receive(
        &mut self,
        into: &mut [u8],
        is_peek: bool,
    ) -> Result<(usize, SocketAddr), Errno> {
        if self.received.is_empty() {
            self.progress();
        }
        let (from, data) = self.received.front().ok_or(AGAIN)?;
        let length = data.len().min(into.len());
        into[..length].copy_from_slice(&data[..length]);
        let from = *from;
        if !is_peek {
            self.received.pop_front();
        }
        Ok((length, from))
    }

    /// All that was sent has left.
    pub(super) fn is_flushed(&self) -> bool {
        self.ends.iter().all(|e| e.free.len() == e.slots as usize)
    }

    /// Asks for the next event to make one of [`Self::event_fds`] readable.
    pub(super) fn arm(&mut self) {
        self.ends.iter().for_each(|end| end.completions.arm());
    }

    /// Descriptors of which one is readable when something has happened.
    pub(super) fn event_fds(&self) -> impl Iterator<Item = c_int> {
        let ends = self.ends.iter().map(|end| end.completions.fd());
        ends.chain([self.fd()])
    }

    /// Takes the events that have made them readable. Answers whether there was one.
    pub(super) fn take_events(&mut self) -> bool {
        let mut is_taken = false;
        for end in &self.ends {
            is_taken |= end.completions.take_events();
        }
        is_taken
    }

    /// Events for `rpoll`, of those that the program asks for.
    pub(super) fn revents(&self, events: i16) -> i16 {
        let mut answer = 0;
        if !self.received.is_empty() {
            answer |= libc::POLLIN;
        }
        if self.ends.iter().all(|end| !end.free.is_empty()) {
            answer |= libc::POLLOUT;
        }
        answer & events
    }
}

/// Room for a control message with an address, in words so that it is aligned.
const CONTROL: usize = 8;

/// Sends a datagram of some pieces from an address of the host's.
fn send_from(udp: &UdpSocket, from: IpAddr, to: SocketAddr, pieces: &[&[u8]]) -> Result<(), Errno> {
    let mut name = SockAddr::new(to);
    let pieces: Vec<IoSlice<'_>> = pieces.iter().map(|p| IoSlice::new(p)).collect();
    let mut control = [0u64; CONTROL];
    // SAFETY: all-zero bytes are valid for these plain C structures. The pieces have the layout of
    // `iovec`, and there is room for the one control message, which is aligned.
    let sent = unsafe {
        let mut message: libc::msghdr = zeroed();
        message.msg_name = name.as_mut_ptr().cast();
        message.msg_namelen = address_length(to);
        message.msg_iov = pieces.as_ptr().cast_mut().cast();
        message.msg_iovlen = pieces.len();
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        let first = libc::CMSG_FIRSTHDR(&raw const message);
        let space = match from {
            IpAddr::V4(addr) => {
                let mut info: libc::in_pktinfo = zeroed();
                info.ipi_spec_dst.s_addr = u32::from_ne_bytes(addr.octets());
                write_control(first, (libc::IPPROTO_IP, libc::IP_PKTINFO), info)
            }
            IpAddr::V6(addr) => {
                let mut info: libc::in6_pktinfo = zeroed();
                info.ipi6_addr.s6_addr = addr.octets();
                write_control(first, (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO), info)
            }
        };
        message.msg_controllen = space;
        libc::sendmsg(udp.as_raw_fd(), &raw const message, 0)
    };
    if sent < 0 { Err(Errno::last()) } else { Ok(()) }
}

/// Writes a control message; answers its length with padding.
///
/// # Safety
/// There is room for it.
unsafe fn write_control<T>(
    at: *mut libc::cmsghdr,
    (level, kind): (c_int, c_int),
    value: T,
) -> usize {
    let size = size_of::<T>() as u32;
    // SAFETY: as the caller promises.
    unsafe {
        (*at).cmsg_level = level;
        (*at).cmsg_type = kind;
        (*at).cmsg_len = libc::CMSG_LEN(size) as usize;
        libc::CMSG_DATA(at).cast::<T>().write_unaligned(value);
        libc::CMSG_SPACE(size) as usize
    }
}

/// Bytes of an address in the sockets' form.
pub(super) fn address_length(addr: SocketAddr) -> libc::socklen_t {
    let size = match addr {
        SocketAddr::V4(_) => size_of::<libc::sockaddr_in>(),
        SocketAddr::V6(_) => size_of::<libc::sockaddr_in6>(),
    };
    size as libc::socklen_t
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_names_a_queue_pair() {
        let mut trust = Trust::default();
        // Unasked: forged, or too late.
        assert!(!trust.handle(Op::Control, false));
        assert!(!trust.handle(Op::Data, false));
        assert!(trust.is_in_doubt);
        trust.is_asked = true;
        assert!(!trust.handle(Op::Data, false));
        assert!(trust.handle(Op::Control, false));
        assert_eq!(trust, Trust::default());
        // The true answer comes behind a forged one: it is asked again.
        assert!(!trust.handle(Op::Control, true));
        assert_eq!(trust, Trust::default());
        assert!(!trust.handle(Op::Control, false));
        assert!(trust.is_in_doubt);
    }
}
