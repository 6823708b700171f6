//! libibumad: management datagrams, for programs such as infiniband-diags.
//!
//! Requests of a program to its own device are handled by the device
//! ([`Verbs::local_mad`](riser_transport::verbs::Verbs::local_mad)). They are used by `ibstat`,
//! `perfquery` and `smpquery -D` without a destination. RoCE has neither LIDs nor a subnet manager,
//! so a datagram to another port gets no response, like on a subnet without this port. Requests for
//! subnet administration are sent to an administrator ([`crate::administration`]). They are used by
//! `saquery` and `ibacm`.
//!
//! An open port is a queue of responses. Its descriptor is used in place of the kernel's.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};

use riser_rdma_core_sys::bindings::*;
use riser_transport::verbs::{Gid, PortState, Verbs as _};
use riser_transport::wire::MAD_LEN;
use riser_transport::wire::mad::MadClass;
use tracing::info;

use crate::cancel::{self, read_count, step};
use crate::devices::{Device, LinkLayer, devices, lid, link_layer};
use crate::engine::Engine;
use crate::errno::Errno;
use crate::lock::{PORTS, unpoisoned};
use crate::mad::{MadAddr, MadResponse, UserMad};
use crate::queue::EventQueue;

/// The only port of a device.
const PORT: c_int = 1;

/// Size of a name in bytes.
const NAME: usize = 20;

/// Maximum number of agents of a port.
const MAX_AGENTS: c_int = 32;

/// Maximum number of responses that a port stores for its program.
const MAX_RESPONSES: usize = 128;

/// Rate of a port, as reported by the kernel for 2.5 Gbit/s, which is the minimum.
const RATE: c_uint = 2;

/// A port (`umad_port_t`).
#[repr(C)]
pub(crate) struct Port {
    ca_name: [c_char; NAME],
    portnum: c_int,
    base_lid: c_uint,
    lmc: c_uint,
    sm_lid: c_uint,
    sm_sl: c_uint,
    state: c_uint,
    phys_state: c_uint,
    rate: c_uint,
    capmask: u32,
    gid_prefix: u64,
    port_guid: u64,
    pkeys_size: c_uint,
    pkeys: *mut u16,
    link_layer: [c_char; NAME],
}

/// A device (`umad_ca_t`).
#[repr(C)]
pub(crate) struct Ca {
    ca_name: [c_char; NAME],
    node_type: c_uint,
    numports: c_int,
    fw_ver: [c_char; 20],
    ca_type: [c_char; 40],
    hw_ver: [c_char; 20],
    node_guid: u64,
    system_guid: u64,
    ports: [*mut Port; 10],
}

/// An entry in a list of devices (`struct umad_device_node`).
#[repr(C)]
pub(crate) struct DeviceNode {
    next: *mut DeviceNode,
    ca_name: *const c_char,
}

/// An open port.
struct OpenPort {
    engine: Arc<Engine>,
    addr: IpAddr,
    responses: Arc<EventQueue<MadResponse>>,
    waiting: usize,
    /// Bit mask of registered agents.
    agents: u32,
}

static OPEN: Mutex<BTreeMap<c_int, OpenPort>> = Mutex::new(BTreeMap::new());

/// Guard of the list of open ports. Its locks must be acquired before the locks of devices.
struct Ports {
    list: MutexGuard<'static, BTreeMap<c_int, OpenPort>>,
    // Dropped after the guard of the list.
    _fork: MutexGuard<'static, ()>,
}

impl Deref for Ports {
    type Target = BTreeMap<c_int, OpenPort>;

    fn deref(&self) -> &Self::Target {
        &self.list
    }
}

impl DerefMut for Ports {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.list
    }
}

fn ports() -> Ports {
    let fork = unpoisoned(PORTS.lock());
    Ports {
        list: unpoisoned(OPEN.lock()),
        _fork: fork,
    }
}

/// Converts the result of a function that returns a number, or a negative error number.
fn negative(result: Result<c_int, Errno>) -> c_int {
    result.unwrap_or_else(|errno| {
        errno.set();
        -errno.0
    })
}

/// Returns the device with a name, or the first device if no name is specified.
unsafe fn device_of(name: *const c_char) -> Result<&'static Device, Errno> {
    let mut all = devices().iter();
    if name.is_null() {
        return all.next().ok_or(Errno(libc::ENODEV));
    }
    // SAFETY: the program passes a valid name.
    let name = unsafe { CStr::from_ptr(name) };
    let found = all.find(|d| d.config.name.as_bytes() == name.to_bytes());
    found.ok_or(Errno(libc::ENODEV))
}

/// Copies a text, truncated to the available space.
fn text<const N: usize>(text: &str) -> [c_char; N] {
    let mut all = [0; N];
    for (to, from) in all.iter_mut().zip(text.bytes().take(N - 1)) {
        *to = from as c_char;
    }
    all
}

/// `umad_init(3)`, `umad_done(3)`.
pub(crate) extern "C" fn umad_init() -> c_int {
    0
}

pub(crate) extern "C" fn umad_done() -> c_int {
    0
}

/// `umad_get_cas_names(3)`.
pub(crate) unsafe extern "C" fn umad_get_cas_names(
    names: *mut [c_char; NAME],
    max: c_int,
) -> c_int {
    let max = usize::try_from(max).unwrap_or(0);
    let all = devices().iter().take(max);
    let mut count = 0;
    for (at, device) in all.enumerate() {
        // SAFETY: the program provides memory for `max` names.
        unsafe { names.add(at).write(text(&device.config.name)) };
        count += 1;
    }
    count
}

/// `umad_get_ca_device_list(3)`.
pub(crate) extern "C" fn umad_get_ca_device_list() -> *mut DeviceNode {
    let mut head = ptr::null_mut();
    for device in devices().iter().rev() {
        // SAFETY: devices and their names are never freed.
        let ca_name = unsafe { (*device.handle()).name.as_ptr() };
        let node = DeviceNode {
            next: head,
            ca_name,
        };
        head = Box::into_raw(Box::new(node));
    }
    head
}

/// `umad_free_ca_device_list(3)`.
pub(crate) unsafe extern "C" fn umad_free_ca_device_list(mut head: *mut DeviceNode) {
    while !head.is_null() {
        // SAFETY: the entries were allocated as boxes.
        head = unsafe { Box::from_raw(head) }.next;
    }
}

/// `umad_sort_ca_device_list(3)`: sorts the list by name.
pub(crate) unsafe extern "C" fn umad_sort_ca_device_list(
    head: *mut *mut DeviceNode,
    _size: usize,
) -> c_int {
    let mut nodes = Vec::new();
    // SAFETY: the program passes a list returned by this library.
    unsafe {
        let mut node = *head;
        while !node.is_null() {
            nodes.push(node);
            node = (*node).next;
        }
        nodes.sort_by_key(|node| CStr::from_ptr((**node).ca_name));
        let mut next = ptr::null_mut();
        for node in nodes.into_iter().rev() {
            (*node).next = next;
            next = node;
        }
        *head = next;
    }
    0
}

/// `umad_get_ca_portguids(3)`: the first entry is port 0, which does not exist on adapters.
pub(crate) unsafe extern "C" fn umad_get_ca_portguids(
    name: *const c_char,
    guids: *mut u64,
    max: c_int,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    negative(unsafe { device_of(name) }.and_then(|device| {
        let all = [0, gid_halves(device.config.addr).1];
        if guids.is_null() {
            return Ok(all.len() as c_int);
        }
        if max < all.len() as c_int {
            return Err(Errno::NO_MEMORY);
        }
        // SAFETY: there is enough space for them.
        unsafe { guids.copy_from_nonoverlapping(all.as_ptr(), all.len()) };
        Ok(all.len() as c_int)
    }))
}

/// Returns the prefix and the GUID of the port at an address, in network byte order.
fn gid_halves(addr: IpAddr) -> (u64, u64) {
    let gid = u128::from_be_bytes(Gid::from(addr).0);
    (((gid >> 64) as u64).to_be(), (gid as u64).to_be())
}

fn describe_port(device: &Device) -> Result<Port, Errno> {
    let engine = Engine::open(&device.config)?;
    let attr = engine.lock().nic.query_port(1)?;
    let is_active = attr.state == PortState::Active;
    let (gid_prefix, port_guid) = gid_halves(device.config.addr);
    // SAFETY: this is the size of a P_Key.
    let pkeys = unsafe { libc::calloc(1, size_of::<u16>()) }.cast::<u16>();
    if pkeys.is_null() {
        return Err(Errno::NO_MEMORY);
    }
    // SAFETY: there is space for one P_Key.
    unsafe { pkeys.write(0xffff) };
    Ok(Port {
        ca_name: text(&device.config.name),
        portnum: PORT,
        base_lid: lid().into(),
        lmc: 0,
        sm_lid: lid().into(),
        sm_sl: 0,
        // Active and link up, or down and polling.
        state: if is_active { 4 } else { 1 },
        phys_state: if is_active { 5 } else { 2 },
        rate: RATE,
        capmask: attr.capabilities.bits().to_be(),
        gid_prefix,
        port_guid,
        pkeys_size: 1,
        pkeys,
        link_layer: text(match link_layer() {
            LinkLayer::Ethernet => "Ethernet",
            LinkLayer::InfiniBand => "InfiniBand",
        }),
    })
}

/// `umad_get_port(3)`: uses the first device if no name is specified, and its only port if the
/// number is 0.
pub(crate) unsafe extern "C" fn umad_get_port(
    name: *const c_char,
    number: c_int,
    port: *mut Port,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    negative(unsafe { device_of(name) }.and_then(|device| {
        if !(0..=PORT).contains(&number) {
            return Err(Errno(libc::ENODEV));
        }
        let described = describe_port(device)?;
        // SAFETY: the program provides memory for the port.
        unsafe { port.write(described) };
        Ok(0)
    }))
}

/// `umad_release_port(3)`.
pub(crate) unsafe extern "C" fn umad_release_port(port: *mut Port) -> c_int {
    // SAFETY: the program passes a port that was initialized by `umad_get_port`.
    unsafe {
        libc::free((*port).pkeys.cast());
        (*port).pkeys = ptr::null_mut();
        (*port).pkeys_size = 0;
    }
    0
}

/// `umad_get_ca(3)`.
pub(crate) unsafe extern "C" fn umad_get_ca(name: *const c_char, ca: *mut Ca) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    negative(unsafe { device_of(name) }.and_then(|device| {
        let guid = device.guid().to_be();
        let mut ports = [ptr::null_mut(); 10];
        ports[PORT as usize] = Box::into_raw(Box::new(describe_port(device)?));
        let described = Ca {
            ca_name: text(&device.config.name),
            node_type: IBV_NODE_CA as c_uint,
            numports: PORT,
            fw_ver: text(env!("CARGO_PKG_VERSION")),
            ca_type: text("Riser software NIC"),
            hw_ver: text("0"),
            node_guid: guid,
            system_guid: guid,
            ports,
        };
        // SAFETY: the program provides memory for the device.
        unsafe { ca.write(described) };
        Ok(0)
    }))
}

/// `umad_release_ca(3)`.
pub(crate) unsafe extern "C" fn umad_release_ca(ca: *mut Ca) -> c_int {
    // SAFETY: the program passes a device that was initialized by `umad_get_ca`. Its ports were
    // allocated as boxes.
    unsafe {
        for port in &mut (*ca).ports {
            let port = std::mem::replace(port, ptr::null_mut());
            if !port.is_null() {
                umad_release_port(port);
                drop(Box::from_raw(port));
            }
        }
    }
    0
}

/// `umad_get_issm_path(3)`: there is no subnet manager on a RoCE port.
pub(crate) unsafe extern "C" fn umad_get_issm_path(
    _name: *const c_char,
    _port: c_int,
    _path: *mut c_char,
    _max: c_int,
) -> c_int {
    negative(Err(Errno(libc::ENODEV)))
}

/// `umad_open_port(3)`.
pub(crate) unsafe extern "C" fn umad_open_port(name: *const c_char, number: c_int) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    negative(unsafe { device_of(name) }.and_then(|device| {
        if !(0..=PORT).contains(&number) {
            return Err(Errno(libc::ENODEV));
        }
        crate::fork::install();
        let port = OpenPort {
            engine: Engine::open(&device.config)?,
            addr: device.config.addr,
            responses: Arc::new(EventQueue::new()?),
            waiting: 0,
            agents: 0,
        };
        let fd = port.responses.raw_fd();
        ports().insert(fd, port);
        Ok(fd)
    }))
}

/// `umad_close_port(3)`.
pub(crate) extern "C" fn umad_close_port(fd: c_int) -> c_int {
    let closed = ports().remove(&fd).ok_or(Errno::INVALID);
    negative(closed.map(|port| {
        if let Some(administration) = &mut port.engine.lock().administration {
            administration.forget(&port.responses);
        }
        0
    }))
}

/// `umad_get_fd(3)`.
pub(crate) extern "C" fn umad_get_fd(fd: c_int) -> c_int {
    fd
}

fn register(fd: c_int) -> Result<c_int, Errno> {
    let mut ports = ports();
    let port = ports.get_mut(&fd).ok_or(Errno::INVALID)?;
    let free = (0..MAX_AGENTS).find(|agent| port.agents >> agent & 1 == 0);
    let agent = free.ok_or(Errno::NO_MEMORY)?;
    port.agents |= 1 << agent;
    Ok(agent)
}

/// `umad_register(3)`. We never receive requests from other hosts, so the methods are not used.
pub(crate) unsafe extern "C" fn umad_register(
    fd: c_int,
    _class: c_int,
    _version: c_int,
    _rmpp_version: u8,
    _method_mask: *mut c_long,
) -> c_int {
    negative(register(fd))
}

/// `umad_register_oui(3)`.
pub(crate) unsafe extern "C" fn umad_register_oui(
    fd: c_int,
    _class: c_int,
    _rmpp_version: u8,
    _oui: *mut u8,
    _method_mask: *mut c_long,
) -> c_int {
    negative(register(fd))
}

/// `umad_register2(3)`: returns a positive error number.
pub(crate) unsafe extern "C" fn umad_register2(
    fd: c_int,
    _attr: *mut c_void,
    agent: *mut u32,
) -> c_int {
    match register(fd) {
        Ok(number) => {
            // SAFETY: the program provides memory for the number.
            unsafe { agent.write(number.unsigned_abs()) };
            0
        }
        Err(errno) => errno.0,
    }
}

/// `umad_unregister(3)`.
pub(crate) extern "C" fn umad_unregister(fd: c_int, agent: c_int) -> c_int {
    let mut ports = ports();
    let port = ports.get_mut(&fd).ok_or(Errno::INVALID);
    negative(port.and_then(|port| {
        if !is_registered(port, agent) {
            return Err(Errno::INVALID);
        }
        port.agents &= !(1 << agent);
        Ok(0)
    }))
}

fn is_registered(port: &OpenPort, agent: c_int) -> bool {
    (0..MAX_AGENTS).contains(&agent) && port.agents >> agent & 1 == 1
}

/// Returns whether the destination of a datagram is the port itself.
fn is_local(addr: &MadAddr, own: IpAddr, class: u8) -> bool {
    /// Destination of a directed-route datagram.
    const PERMISSIVE: u16 = 0xffff;
    let by_gid = addr.grh_present != 0 && addr.gid == Gid::from(own).0;
    let is_directed = class == MadClass::SubnDirected as u8;
    let to = u16::from_be(addr.lid);
    let is_own = to == 0 || to == lid() || is_directed && to == PERMISSIVE;
    let by_lid = addr.grh_present == 0 && is_own;
    (by_gid || by_lid) && u32::from_be(addr.qpn) <= 1
}

/// `umad_send(3)`. A datagram that gets no response is returned with a timeout error, but
/// immediately.
pub(crate) unsafe extern "C" fn umad_send(
    fd: c_int,
    agent: c_int,
    mad: *mut UserMad,
    length: c_int,
    timeout_ms: c_int,
    retries: c_int,
) -> c_int {
    let mut ports = ports();
    let port = ports.get_mut(&fd).ok_or(Errno::INVALID);
    negative(port.and_then(|port| {
        if !is_registered(port, agent) || length != MAD_LEN as c_int {
            return Err(Errno::INVALID);
        }
        if port.waiting == MAX_RESPONSES {
            return Err(Errno(libc::EAGAIN));
        }
        // SAFETY: the program passes a datagram with this number of bytes after its header.
        let (mut head, bytes) = unsafe {
            (*mad).agent_id = agent.unsigned_abs();
            (*mad).timeout_ms = timeout_ms.unsigned_abs();
            (*mad).retries = retries.unsigned_abs();
            (mad.read(), mad.add(1).cast::<[u8; MAD_LEN]>().read())
        };
        let class = bytes[1];
        if class == MadClass::SubnetAdm as u8 {
            let responses = Arc::clone(&port.responses);
            let host = (head.addr.grh_present != 0 && head.addr.gid != [0; 16])
                .then(|| Gid(head.addr.gid).ip());
            let mut engine = port.engine.lock();
            engine.administrate(|administration, nic| {
                administration.send(nic, (head, bytes), host, responses);
            })?;
            engine.transmit();
            drop(engine);
            port.waiting += usize::from(timeout_ms != 0);
            return Ok(0);
        }
        let response = match is_local(&head.addr, port.addr, class) {
            true => port.engine.lock().nic.local_mad(1, &bytes)?,
            false => None,
        };
        // If no response is expected, nothing is reported.
        if response.is_none() && timeout_ms == 0 {
            return Ok(0);
        }
        head.status = response.map_or(libc::ETIMEDOUT.unsigned_abs(), |_| 0);
        head.set_length(MAD_LEN);
        port.waiting += 1;
        let bytes = response.unwrap_or(bytes).to_vec();
        port.responses.push(MadResponse { head, bytes });
        Ok(0)
    }))
}

fn queue_of(fd: c_int) -> Result<Arc<EventQueue<MadResponse>>, Errno> {
    let ports = ports();
    let port = ports.get(&fd).ok_or(Errno::INVALID)?;
    Ok(Arc::clone(&port.responses))
}

/// `umad_poll(3)`.
pub(crate) extern "C-unwind" fn umad_poll(fd: c_int, timeout_ms: c_int) -> c_int {
    match step(|| negative(queue_of(fd).map(|_| 0))) {
        // SAFETY: the port is open, and no frame has anything to drop.
        0 => unsafe { wait(fd, timeout_ms) },
        error => error,
    }
}

/// Waits until the descriptor of a port is readable. Returns 0 or a negative error number.
///
/// # Safety
/// Same as for [`cancel::wait`].
unsafe fn wait(fd: c_int, timeout_ms: c_int) -> c_int {
    let mut fds = [libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    }];
    // A negative timeout never expires.
    let timeout = (timeout_ms >= 0).then(|| libc::timespec {
        tv_sec: (timeout_ms / 1000).into(),
        tv_nsec: (timeout_ms % 1000 * 1_000_000).into(),
    });
    // SAFETY: guaranteed by the caller.
    let ready = unsafe { cancel::wait(&mut fds, timeout, None) };
    step(|| {
        negative(match ready {
            0 => Err(Errno(libc::ETIMEDOUT)),
            1 => Ok(0),
            _ => Err(Errno(libc::EIO)),
        })
    })
}

/// `umad_recv(3)`: returns the agent of the datagram.
pub(crate) unsafe extern "C-unwind" fn umad_recv(
    fd: c_int,
    mad: *mut UserMad,
    length: *mut c_int,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    let refused = step(|| unsafe { refuse(fd, length) });
    if refused != 0 {
        return refused;
    }
    if timeout_ms != 0 {
        // SAFETY: the port is open, and no frame has anything to drop.
        let waited = unsafe { wait(fd, timeout_ms) };
        if waited != 0 {
            return waited;
        }
    }
    loop {
        // SAFETY: as above.
        let error = unsafe { read_count(fd) };
        // SAFETY: the program passes valid pointers, as required by the manual page.
        if let Some(result) = step(|| unsafe { take_mad(fd, error, mad, length) }) {
            return result;
        }
    }
}

/// Returns a negative error number if the port is not open, or if there is not enough space for a
/// datagram.
///
/// # Safety
/// The program must pass a valid pointer, as required by the manual page.
unsafe fn refuse(fd: c_int, length: *mut c_int) -> c_int {
    negative(queue_of(fd).and_then(|_| {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if usize::try_from(*length).unwrap_or(0) >= MAD_LEN {
                return Ok(0);
            }
            *length = MAD_LEN as c_int;
        }
        Err(Errno(libc::ENOSPC))
    }))
}

/// Returns the next datagram to the program. Returns `None` if it must wait again.
///
/// # Safety
/// The program must pass valid pointers, as required by the manual page, with space for a datagram.
unsafe fn take_mad(
    fd: c_int,
    error: c_int,
    mad: *mut UserMad,
    length: *mut c_int,
) -> Option<c_int> {
    if error != 0 {
        return Some(negative(Err(Errno(error))));
    }
    let queue = match queue_of(fd) {
        Ok(queue) => queue,
        Err(errno) => return Some(negative(Err(errno))),
    };
    // We must not check its length before it is removed from the queue, because another thread
    // could remove it.
    let response = queue.pop(|_| {})?;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let needed = response.bytes.len();
        if needed > usize::try_from(*length).unwrap_or(0) {
            mad.write(response.head);
            *length = needed as c_int;
            queue.put_back(response);
            return Some(negative(Err(Errno(libc::ENOSPC))));
        }
        if let Some(port) = ports().get_mut(&fd) {
            port.waiting = port.waiting.saturating_sub(1);
        }
        // There is enough space for the header and for this number of bytes, which was checked
        // above.
        mad.write(response.head);
        let place = mad.add(1).cast::<u8>();
        place.copy_from_nonoverlapping(response.bytes.as_ptr(), needed);
        *length = needed as c_int;
    }
    Some(response.head.agent_id.cast_signed())
}

/// `umad_get_mad(3)`: returns the bytes after the header.
pub(crate) unsafe extern "C" fn umad_get_mad(mad: *mut UserMad) -> *mut c_void {
    mad.wrapping_add(1).cast()
}

/// `umad_size(3)`.
pub(crate) extern "C" fn umad_size() -> usize {
    size_of::<UserMad>()
}

/// `umad_status(3)`.
pub(crate) unsafe extern "C" fn umad_status(mad: *mut UserMad) -> c_int {
    // SAFETY: the program passes a valid datagram.
    unsafe { (*mad).status.cast_signed() }
}

/// `umad_get_mad_addr(3)`.
pub(crate) unsafe extern "C" fn umad_get_mad_addr(mad: *mut UserMad) -> *mut MadAddr {
    // SAFETY: the program passes a valid datagram.
    unsafe { &raw mut (*mad).addr }
}

/// `umad_set_grh(3)`: the flow label is in host byte order.
pub(crate) unsafe extern "C" fn umad_set_grh(mad: *mut UserMad, grh: *const MadAddr) -> c_int {
    // SAFETY: the program passes a valid datagram, and either a valid address or null.
    unsafe {
        let addr = &mut (*mad).addr;
        addr.grh_present = u8::from(!grh.is_null());
        if let Some(grh) = grh.as_ref() {
            addr.gid = grh.gid;
            addr.flow_label = grh.flow_label.to_be();
            addr.hop_limit = grh.hop_limit;
            addr.traffic_class = grh.traffic_class;
            addr.gid_index = grh.gid_index;
        }
    }
    0
}

/// `umad_set_addr(3)`.
pub(crate) unsafe extern "C" fn umad_set_addr(
    mad: *mut UserMad,
    lid: c_int,
    qpn: c_int,
    sl: c_int,
    qkey: c_int,
) -> c_int {
    let (lid, qpn) = ((lid as u16).to_be(), qpn.cast_unsigned().to_be());
    // SAFETY: guaranteed by the caller.
    unsafe { umad_set_addr_net(mad, lid, qpn, sl, qkey.cast_unsigned().to_be()) }
}

/// `umad_set_addr_net(3)`: the values are in network byte order.
pub(crate) unsafe extern "C" fn umad_set_addr_net(
    mad: *mut UserMad,
    lid: u16,
    qpn: u32,
    sl: c_int,
    qkey: u32,
) -> c_int {
    // SAFETY: the program passes a valid datagram.
    unsafe {
        let addr = &mut (*mad).addr;
        addr.lid = lid;
        addr.qpn = qpn;
        addr.sl = sl as u8;
        addr.qkey = qkey;
    }
    0
}

/// `umad_set_pkey(3)`.
pub(crate) unsafe extern "C" fn umad_set_pkey(mad: *mut UserMad, index: c_int) -> c_int {
    // SAFETY: the program passes a valid datagram.
    unsafe { (*mad).addr.pkey_index = index as u16 };
    0
}

/// `umad_get_pkey(3)`.
pub(crate) unsafe extern "C" fn umad_get_pkey(mad: *mut UserMad) -> c_int {
    // SAFETY: the program passes a valid datagram.
    unsafe { (*mad).addr.pkey_index.into() }
}

/// `umad_debug(3)`: ignored, because the log level is set by `RISER_LOG`.
pub(crate) extern "C" fn umad_debug(_level: c_int) -> c_int {
    0
}

/// `umad_dump(3)`.
pub(crate) unsafe extern "C" fn umad_dump(mad: *mut UserMad) {
    // SAFETY: the program passes a valid datagram.
    info!("{:?}", unsafe { &*mad });
}

/// `umad_addr_dump(3)`.
pub(crate) unsafe extern "C" fn umad_addr_dump(addr: *mut MadAddr) {
    // SAFETY: the program passes a valid address.
    info!("{:?}", unsafe { &*addr });
}

/// `umad_class_str(3)`.
pub(crate) extern "C" fn umad_class_str(class: u8) -> *const c_char {
    let name = match class {
        0x01 => c"Subn",
        0x03 => c"SubnAdm",
        0x04 => c"Perf",
        0x05 => c"BM",
        0x06 => c"DevMgt",
        0x07 => c"ComMgt",
        0x08 => c"SNMP",
        0x81 => c"Subn (Directed Route)",
        _ => c"<unknown>",
    };
    name.as_ptr()
}

/// `umad_method_str(3)`.
pub(crate) extern "C" fn umad_method_str(_class: u8, method: u8) -> *const c_char {
    let name = match method {
        0x01 => c"Get",
        0x02 => c"Set",
        0x03 => c"Send",
        0x05 => c"Trap",
        0x06 => c"Report",
        0x07 => c"TrapRepress",
        0x81 => c"GetResp",
        0x86 => c"ReportResp",
        _ => c"<unknown>",
    };
    name.as_ptr()
}

/// `umad_attribute_str(3)`: only supports attributes that are common to all classes.
pub(crate) extern "C" fn umad_attribute_str(_class: u8, attribute: u16) -> *const c_char {
    let name = match u16::from_be(attribute) {
        0x0001 => c"ClassPortInfo",
        0x0002 => c"Notice",
        0x0003 => c"InformInfo",
        _ => c"<unknown>",
    };
    name.as_ptr()
}

/// `umad_common_mad_status_str(3)`: uses the code that is common to all classes, without the bits
/// for busy and redirected agents.
pub(crate) extern "C" fn umad_common_mad_status_str(status: u16) -> *const c_char {
    let name = match u16::from_be(status) & 0x1c {
        0 => c"Success",
        0x04 => c"Bad version, or class/version combination not supported",
        0x08 => c"Method not supported",
        0x0c => c"Method/attribute combination not supported",
        0x1c => c"Invalid attribute or modifier value",
        _ => c"Reserved/unknown",
    };
    name.as_ptr()
}

/// `umad_sa_mad_status_str(3)`.
pub(crate) extern "C" fn umad_sa_mad_status_str(status: u16) -> *const c_char {
    let name = match u16::from_be(status) >> 8 {
        0 => c"Success",
        1 => c"No Resources",
        2 => c"Request Invalid",
        3 => c"No Records",
        4 => c"Too Many Records",
        5 => c"Invalid GID",
        6 => c"Insufficient Components",
        7 => c"Request Denied",
        _ => c"<unknown>",
    };
    name.as_ptr()
}
