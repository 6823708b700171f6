//! Connections, using the RDMA CM functions called by programs.

#![allow(unsafe_code, reason = "a C interface is called")]
#![allow(unused_unsafe, reason = "calls have blocks of their own")]

mod library;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::zeroed;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use library::*;
use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::ops;
use riser_testkit::eventually;

/// Address of riser1, which is the server.
const SERVER: &CStr = c"127.0.41.2";

fn create_channel() -> *mut rdma_event_channel {
    let channel = call!(rdma_create_event_channel() -> *mut rdma_event_channel);
    assert!(!channel.is_null());
    channel
}

fn create_id(channel: *mut rdma_event_channel, space: rdma_port_space) -> *mut rdma_cm_id {
    let mut id = ptr::null_mut();
    let result = call!(rdma_create_id(channel => *mut rdma_event_channel,
        &raw mut id => *mut *mut rdma_cm_id, ptr::null_mut() => *mut c_void,
        space => rdma_port_space) -> c_int);
    assert_eq!(result, 0);
    id
}

fn destroy_id(id: *mut rdma_cm_id) {
    assert_eq!(call!(rdma_destroy_id(id => *mut rdma_cm_id) -> c_int), 0);
}

fn destroy_channel(channel: *mut rdma_event_channel) {
    call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
}

/// Waits for the next event of a channel, which must have this type. `look` is called before it is
/// acknowledged.
fn event<T>(
    channel: *mut rdma_event_channel,
    expected: rdma_cm_event_type,
    look: impl FnOnce(&rdma_cm_event) -> T,
) -> T {
    event_with(channel, (expected, 0), look)
}

/// Same as [`event`], but also checks the status.
fn event_with<T>(
    channel: *mut rdma_event_channel,
    expected: (rdma_cm_event_type, c_int),
    look: impl FnOnce(&rdma_cm_event) -> T,
) -> T {
    let mut event: *mut rdma_cm_event = ptr::null_mut();
    // SAFETY: the channel is alive.
    unsafe {
        let mut fd = libc::pollfd {
            fd: (*channel).fd,
            events: libc::POLLIN,
            revents: 0,
        };
        assert_eq!(libc::poll(&raw mut fd, 1, 20_000), 1, "no event");
    }
    let result = call!(rdma_get_cm_event(channel => *mut rdma_event_channel,
        &raw mut event => *mut *mut rdma_cm_event) -> c_int);
    assert_eq!(result, 0);
    // SAFETY: the event is alive until it is acknowledged.
    let seen = unsafe {
        assert_eq!(((*event).event, (*event).status), expected);
        look(&*event)
    };
    let result = call!(rdma_ack_cm_event(event => *mut rdma_cm_event) -> c_int);
    assert_eq!(result, 0);
    seen
}

/// Calls `rdma_getaddrinfo` with a host, a port and hints.
fn address_info(
    host: Option<&CStr>,
    port: u16,
    hints: &rdma_addrinfo,
) -> Result<*mut rdma_addrinfo, c_int> {
    let port = CString::new(port.to_string()).unwrap();
    let mut info = ptr::null_mut();
    let result = call!(rdma_getaddrinfo(
        host.map_or(ptr::null(), CStr::as_ptr) => *const c_char, port.as_ptr() => *const c_char,
        ptr::from_ref(hints) => *const rdma_addrinfo,
        &raw mut info => *mut *mut rdma_addrinfo) -> c_int);
    match result {
        0 => Ok(info),
        _ => Err(result),
    }
}

/// Creates hints for a type of queue pair.
fn hints(space: rdma_port_space, qp_type: ibv_qp_type, flags: u32) -> rdma_addrinfo {
    // SAFETY: all zeroes is valid.
    let mut hints: rdma_addrinfo = unsafe { zeroed() };
    hints.ai_flags = flags as c_int;
    hints.ai_port_space = space as c_int;
    hints.ai_qp_type = qp_type as c_int;
    hints
}

/// Creates an endpoint that either listens on a port of the server, or will connect to it.
fn end_point(
    port: u16,
    hints: &rdma_addrinfo,
    attr: Option<&mut ibv_qp_init_attr>,
) -> *mut rdma_cm_id {
    let info = address_info(Some(SERVER), port, hints).unwrap();
    let mut id = ptr::null_mut();
    let result = call!(rdma_create_ep(&raw mut id => *mut *mut rdma_cm_id,
        info => *mut rdma_addrinfo, ptr::null_mut() => *mut ibv_pd,
        attr.map_or(ptr::null_mut(), ptr::from_mut) => *mut ibv_qp_init_attr) -> c_int);
    assert_eq!(result, 0, "{}", errno());
    call!(rdma_freeaddrinfo(info => *mut rdma_addrinfo));
    id
}

fn listen(id: *mut rdma_cm_id) {
    let result = call!(rdma_listen(id => *mut rdma_cm_id, 4 => c_int) -> c_int);
    assert_eq!(result, 0, "{}", errno());
}

fn get_request(listener: *mut rdma_cm_id) -> *mut rdma_cm_id {
    let mut id = ptr::null_mut();
    let result = call!(rdma_get_request(listener => *mut rdma_cm_id,
        &raw mut id => *mut *mut rdma_cm_id) -> c_int);
    assert_eq!(result, 0, "{}", errno());
    id
}

fn accept(id: *mut rdma_cm_id, param: &mut rdma_conn_param) {
    let result = call!(rdma_accept(id => *mut rdma_cm_id,
        ptr::from_mut(param) => *mut rdma_conn_param) -> c_int);
    assert_eq!(result, 0, "{}", errno());
}

fn connect(id: *mut rdma_cm_id, param: &mut rdma_conn_param) {
    let result = call!(rdma_connect(id => *mut rdma_cm_id,
        ptr::from_mut(param) => *mut rdma_conn_param) -> c_int);
    assert_eq!(result, 0, "{}", errno());
}

fn destroy_ep(id: *mut rdma_cm_id) {
    call!(rdma_destroy_ep(id => *mut rdma_cm_id));
}

/// Returns attributes of a small queue pair.
fn small() -> ibv_qp_init_attr {
    // SAFETY: all zeroes is valid.
    let mut attr: ibv_qp_init_attr = unsafe { zeroed() };
    attr.cap.max_send_wr = 4;
    attr.cap.max_recv_wr = 4;
    attr.cap.max_send_sge = 1;
    attr.cap.max_recv_sge = 1;
    attr.sq_sig_all = 1;
    attr
}

/// Registers memory in the domain of an identifier.
fn register(id: *mut rdma_cm_id, memory: &mut [u8]) -> *mut ibv_mr {
    // SAFETY: the identifier and its domain are alive.
    let mr = unsafe {
        call!(ibv_reg_mr((*id).pd => *mut ibv_pd, memory.as_mut_ptr().cast() => *mut c_void,
            memory.len() => usize, IBV_ACCESS_LOCAL_WRITE as c_int => c_int) -> *mut ibv_mr)
    };
    assert!(!mr.is_null(), "{}", errno());
    mr
}

/// Sends a few bytes inline, to a shared receive queue if a number is specified.
fn send(id: *mut rdma_cm_id, data: &[u8], srqn: Option<u32>) {
    let mut sge = ibv_sge {
        addr: data.as_ptr().addr() as u64,
        length: data.len() as u32,
        lkey: 0,
    };
    // SAFETY: all zeroes is valid, and the objects are alive.
    unsafe {
        let mut wr: ibv_send_wr = zeroed();
        wr.sg_list = &raw mut sge;
        wr.num_sge = 1;
        wr.opcode = IBV_WR_SEND;
        wr.send_flags = IBV_SEND_INLINE;
        if let Some(number) = srqn {
            wr.qp_type.xrc.remote_srqn = number;
        }
        let mut bad = ptr::null_mut();
        assert_eq!(ops::ibv_post_send((*id).qp, &raw mut wr, &raw mut bad), 0);
        assert_eq!(completions((*id).send_cq, 1)[0].status, IBV_WC_SUCCESS);
    }
}

#[test]
fn endpoints_create_unreliable_connection() {
    const PORT: u16 = 7001;
    let hints = |flags| hints(RDMA_PS_IB, IBV_QPT_UC, flags);
    let listener = end_point(PORT, &hints(RAI_PASSIVE), Some(&mut small()));
    listen(listener);
    let listener = listener.expose_provenance();
    let server = thread::spawn(move || {
        let listener = ptr::with_exposed_provenance_mut(listener);
        let id = get_request(listener);
        let mut memory = [0u8; 16];
        let mr = register(id, &mut memory);
        // SAFETY: the identifier is alive.
        unsafe {
            assert_eq!((*(*id).qp).qp_type, IBV_QPT_UC);
            post_recv((*id).qp, 1, Some(sge(mr, 0, 16)));
            accept(id, &mut numbered(0));
            assert_eq!(completions((*id).recv_cq, 1)[0].byte_len, 5);
        }
        assert_eq!(&memory[..5], b"hello");
        assert_eq!(call!(ibv_dereg_mr(mr => *mut ibv_mr) -> c_int), 0);
        destroy_ep(id);
        destroy_ep(listener);
    });
    let id = end_point(PORT, &hints(0), Some(&mut small()));
    connect(id, &mut numbered(0));
    send(id, b"hello", None);
    server.join().unwrap();
    destroy_ep(id);
    // Types that do not support connections.
    for kind in [IBV_QPT_RAW_PACKET, IBV_QPT_DRIVER, 77] {
        let info = address_info(Some(SERVER), PORT, &self::hints(RDMA_PS_IB, kind, 0)).unwrap();
        let mut id = ptr::null_mut();
        let result = call!(rdma_create_ep(&raw mut id => *mut *mut rdma_cm_id,
            info => *mut rdma_addrinfo, ptr::null_mut() => *mut ibv_pd,
            ptr::null_mut() => *mut ibv_qp_init_attr) -> c_int);
        assert_eq!((result, errno()), (-1, libc::EINVAL), "{kind}");
        call!(rdma_freeaddrinfo(info => *mut rdma_addrinfo));
    }
}

#[test]
fn request_without_queue_pair_is_rejected() {
    const PORT: u16 = 7009;
    let hints = |flags| hints(RDMA_PS_TCP, IBV_QPT_RC, flags);
    let mut attr = small();
    attr.cap.max_send_wr = u32::MAX;
    let listener = end_point(PORT, &hints(RAI_PASSIVE), Some(&mut attr));
    listen(listener);
    let client = thread::spawn(move || {
        let id = end_point(PORT, &hints(0), Some(&mut small()));
        let mut param = numbered(0);
        let result = call!(rdma_connect(id => *mut rdma_cm_id,
            &raw mut param => *mut rdma_conn_param) -> c_int);
        let outcome = (result, errno());
        destroy_ep(id);
        outcome
    });
    let mut id = ptr::null_mut();
    let result = call!(rdma_get_request(listener => *mut rdma_cm_id,
        &raw mut id => *mut *mut rdma_cm_id) -> c_int);
    assert_eq!((result, errno()), (-1, libc::EINVAL));
    // The listener has no events that would have to be acknowledged.
    let listener = listener.expose_provenance();
    let end = thread::spawn(move || destroy_ep(ptr::with_exposed_provenance_mut(listener)));
    eventually("the end of the listener", Duration::from_secs(20), || {
        end.is_finished()
    });
    assert_eq!(client.join().unwrap(), (-1, libc::ECONNREFUSED));
}

#[test]
fn endpoints_create_xrc_connection() {
    const PORT: u16 = 7002;
    let passive = hints(RDMA_PS_IB, IBV_QPT_XRC_RECV, RAI_PASSIVE);
    let listener = end_point(PORT, &passive, Some(&mut small()));
    listen(listener);
    let listener = listener.expose_provenance();
    let server = thread::spawn(move || {
        let listener = ptr::with_exposed_provenance_mut(listener);
        let id = get_request(listener);
        // SAFETY: the identifier is alive. All zeroes are valid attributes and parameters.
        unsafe {
            assert_eq!((*(*id).qp).qp_type, IBV_QPT_XRC_RECV);
            let mut attr: ibv_srq_init_attr_ex = zeroed();
            attr.attr.max_wr = 4;
            attr.attr.max_sge = 1;
            let create = |attr: &mut ibv_srq_init_attr_ex| {
                call!(rdma_create_srq_ex(id => *mut rdma_cm_id,
                    ptr::from_mut(attr) => *mut ibv_srq_init_attr_ex) -> c_int)
            };
            assert_eq!((create(&mut attr), errno()), (-1, libc::EINVAL), "no type");
            attr.comp_mask = IBV_SRQ_INIT_ATTR_TYPE;
            attr.srq_type = IBV_SRQT_TM;
            assert_eq!((create(&mut attr), errno()), (-1, libc::EOPNOTSUPP));
            attr.srq_type = IBV_SRQT_XRC;
            assert_eq!(create(&mut attr), 0, "{}", errno());
            assert_eq!((create(&mut attr), errno()), (-1, libc::EINVAL), "a second");
            // The domains and the completion queue were created by the library.
            assert!(!attr.xrcd.is_null() && attr.cq == (*id).recv_cq && attr.pd == (*id).pd);
            assert!((*attr.cq).channel == (*id).recv_cq_channel);
            let mut number = 0u32;
            let context: *mut ibv_context = (*id).verbs;
            let table: *const verbs_context = context
                .byte_sub(std::mem::offset_of!(verbs_context, context))
                .cast();
            assert_eq!((*table).get_srq_num.unwrap()((*id).srq, &raw mut number), 0);

            let mut memory = [0u8; 16];
            let mr = register(id, &mut memory);
            let (mut piece, mut wr) = (sge(mr, 0, 16), zeroed::<ibv_recv_wr>());
            (wr.sg_list, wr.num_sge) = (&raw mut piece, 1);
            let mut bad = ptr::null_mut();
            let posted = ops::ibv_post_srq_recv((*id).srq, &raw mut wr, &raw mut bad);
            assert_eq!(posted, 0);
            let number = number.to_be_bytes();
            let mut param: rdma_conn_param = zeroed();
            (param.private_data, param.private_data_len) = (number.as_ptr().cast(), 4);
            accept(id, &mut param);
            assert_eq!(completions((*id).recv_cq, 1)[0].byte_len, 5);
            assert_eq!(&memory[..5], b"hello");
            assert_eq!(call!(ibv_dereg_mr(mr => *mut ibv_mr) -> c_int), 0);
        }
        destroy_ep(id);
        destroy_ep(listener);
    });
    let active = hints(RDMA_PS_IB, IBV_QPT_XRC_SEND, 0);
    let id = end_point(PORT, &active, Some(&mut small()));
    // SAFETY: the event belongs to the identifier, and has private data.
    let number = unsafe {
        connect(id, &mut numbered(0));
        let data = (*(*id).event).param.conn.private_data.cast::<[u8; 4]>();
        u32::from_be_bytes(data.read())
    };
    send(id, b"hello", Some(number));
    server.join().unwrap();
    destroy_ep(id);
}

/// A listener on a port of the server, and an identifier that has resolved its address. Both have a
/// channel.
struct Asynchronous {
    channels: [*mut rdma_event_channel; 2],
    listener: *mut rdma_cm_id,
    id: *mut rdma_cm_id,
}

impl Asynchronous {
    fn new(port: u16) -> Self {
        let channels = [create_channel(), create_channel()];
        let hints = hints(RDMA_PS_TCP, IBV_QPT_RC, 0);
        let info = address_info(Some(SERVER), port, &hints).unwrap();
        // SAFETY: the information is alive.
        let addr = unsafe { (*info).ai_dst_addr };
        let listener = create_id(channels[1], RDMA_PS_TCP);
        let bound = call!(rdma_bind_addr(listener => *mut rdma_cm_id, addr => *mut sockaddr)
            -> c_int);
        assert_eq!(bound, 0);
        listen(listener);
        let id = create_id(channels[0], RDMA_PS_TCP);
        let begun = call!(rdma_resolve_addr(id => *mut rdma_cm_id, ptr::null_mut() => *mut sockaddr,
            addr => *mut sockaddr, 1000 => c_int) -> c_int);
        assert_eq!(begun, 0);
        event(channels[0], RDMA_CM_EVENT_ADDR_RESOLVED, |_| ());
        let begun = call!(rdma_resolve_route(id => *mut rdma_cm_id, 1000 => c_int) -> c_int);
        assert_eq!(begun, 0);
        event(channels[0], RDMA_CM_EVENT_ROUTE_RESOLVED, |_| ());
        call!(rdma_freeaddrinfo(info => *mut rdma_addrinfo));
        Self {
            channels,
            listener,
            id,
        }
    }

    /// Waits for the next request of the listener.
    fn request(&self) -> *mut rdma_cm_id {
        event(self.channels[1], RDMA_CM_EVENT_CONNECT_REQUEST, |event| {
            assert_eq!(event.listen_id, self.listener);
            event.id
        })
    }
}

impl Drop for Asynchronous {
    fn drop(&mut self) {
        destroy_id(self.id);
        destroy_id(self.listener);
        self.channels.into_iter().for_each(destroy_channel);
    }
}

/// Returns parameters with the number of a queue pair that the program modifies itself.
fn numbered(qp_num: u32) -> rdma_conn_param {
    // SAFETY: all zeroes is valid.
    let mut param: rdma_conn_param = unsafe { zeroed() };
    param.qp_num = qp_num;
    param
}

fn ece(vendor_id: u32, options: u32, comp_mask: u32) -> ibv_ece {
    ibv_ece {
        vendor_id,
        options,
        comp_mask,
    }
}

fn set_ece(id: *mut rdma_cm_id, mut ece: ibv_ece) -> c_int {
    call!(rdma_set_local_ece(id => *mut rdma_cm_id, &raw mut ece => *mut ibv_ece) -> c_int)
}

fn remote_ece(id: *mut rdma_cm_id) -> (u32, u32, u32) {
    let mut found = ece(1, 1, 1);
    let result = call!(rdma_get_remote_ece(id => *mut rdma_cm_id, &raw mut found => *mut ibv_ece)
        -> c_int);
    assert_eq!(result, 0);
    (found.vendor_id, found.options, found.comp_mask)
}

#[test]
fn vendor_options_are_exchanged() {
    let both = Asynchronous::new(7003);
    for wrong in [ece(0, 1, 0), ece(0x15b3, 1, 1)] {
        assert_eq!((set_ece(both.id, wrong), errno()), (-1, libc::EINVAL));
    }
    assert_eq!(set_ece(both.id, ece(0x15b3, 0xf00d_0003, 0)), 0);
    connect(both.id, &mut numbered(77));
    let request = both.request();
    assert_eq!(remote_ece(request), (0x15b3, 0xf00d_0003, 0));
    // The response uses the vendor of the request.
    assert_eq!(set_ece(request, ece(0xabcd, 0x0000_0001, 0)), 0);
    let mut param = numbered(78);
    let accepted = call!(rdma_accept(request => *mut rdma_cm_id,
        &raw mut param => *mut rdma_conn_param) -> c_int);
    assert_eq!(accepted, 0);
    event(both.channels[0], RDMA_CM_EVENT_CONNECT_RESPONSE, |event| {
        // SAFETY: the event has connection parameters.
        assert_eq!(unsafe { event.param.conn.qp_num }, 78);
    });
    assert_eq!(remote_ece(both.id), (0x15b3, 1, 0));
    let refused = call!(rdma_reject_ece(both.id => *mut rdma_cm_id, ptr::null() => *const c_void,
        0 => u8) -> c_int);
    assert_eq!(refused, 0);
    let mut seen: *mut rdma_cm_event = ptr::null_mut();
    let result = call!(rdma_get_cm_event(both.channels[1] => *mut rdma_event_channel,
        &raw mut seen => *mut *mut rdma_cm_event) -> c_int);
    assert_eq!(result, 0);
    // SAFETY: the event is alive.
    unsafe {
        // Reason 35: vendor option not supported.
        assert_eq!(
            ((*seen).event, (*seen).status),
            (RDMA_CM_EVENT_REJECTED, 35)
        );
    }
    call!(rdma_ack_cm_event(seen => *mut rdma_cm_event) -> c_int);
    destroy_id(request);

    // Queue pairs of the device have no vendor options, and neither do their identifiers.
    let device = Device::open("riser0");
    let cq = device.create_cq(4);
    let qp = device.create_qp_ex(&mut device.qp_attr(cq, IBV_QPT_RC, IBV_QP_EX_WITH_SEND));
    let mut found = ece(1, 1, 1);
    let result = call!(ibv_query_ece(qp => *mut ibv_qp, &raw mut found => *mut ibv_ece) -> c_int);
    assert_eq!(result, libc::EOPNOTSUPP);
    assert_eq!((found.vendor_id, found.options, found.comp_mask), (0, 0, 0));
    let result = call!(ibv_set_ece(qp => *mut ibv_qp, &raw mut found => *mut ibv_ece) -> c_int);
    assert_eq!(result, libc::EOPNOTSUPP);
    let null = ptr::null_mut::<ibv_qp>();
    let result = call!(ibv_query_ece(null => *mut ibv_qp, &raw mut found => *mut ibv_ece) -> c_int);
    assert_eq!(result, libc::EINVAL);
    let with_qp = Asynchronous::new(7004);
    assert_eq!(set_ece(with_qp.id, ece(0x15b3, 1, 0)), 0);
    let mut attr = small();
    attr.qp_type = IBV_QPT_RC;
    let made = call!(rdma_create_qp(with_qp.id => *mut rdma_cm_id, ptr::null_mut() => *mut ibv_pd,
        &raw mut attr => *mut ibv_qp_init_attr) -> c_int);
    assert_eq!(made, 0, "{}", errno());
    let refused = set_ece(with_qp.id, ece(0x15b3, 1, 0));
    assert_eq!((refused, errno()), (-1, libc::EINVAL));
    connect(with_qp.id, &mut numbered(0));
    let request = with_qp.request();
    assert_eq!(remote_ece(request), (0, 0, 0));
    destroy_id(request);
    call!(rdma_destroy_qp(with_qp.id => *mut rdma_cm_id));
}

#[test]
fn program_reports_established_connection() {
    let both = Asynchronous::new(7005);
    let notify =
        |id, event| call!(rdma_notify(id => *mut rdma_cm_id, event => ibv_event_type) -> c_int);
    let port = |id| {
        let own = call!(rdma_get_src_port(id => *mut rdma_cm_id) -> u16);
        let peer = call!(rdma_get_dst_port(id => *mut rdma_cm_id) -> u16);
        (u16::from_be(own), u16::from_be(peer))
    };
    connect(both.id, &mut numbered(77));
    let request = both.request();
    // Ports in network byte order, with the local port first.
    let (own, peer) = port(both.id);
    assert!(own >= 32_768, "{own}");
    assert_eq!(peer, 7005);
    assert_eq!(port(request), (7005, own));
    assert_eq!(port(both.listener), (7005, 0));
    assert_eq!(port(ptr::null_mut()), (0, 0));

    let early = notify(request, IBV_EVENT_COMM_EST);
    assert_eq!((early, errno()), (-1, libc::EINVAL));
    let mut param = numbered(78);
    let accepted = call!(rdma_accept(request => *mut rdma_cm_id,
        &raw mut param => *mut rdma_conn_param) -> c_int);
    assert_eq!(accepted, 0);
    event(both.channels[0], RDMA_CM_EVENT_CONNECT_RESPONSE, |_| ());
    // The other side waits for its program, so no RTU is received.
    for wrong in [IBV_EVENT_PATH_MIG, 99] {
        assert_eq!((notify(request, wrong), errno()), (-1, libc::EINVAL));
    }
    assert_eq!(notify(request, IBV_EVENT_COMM_EST), 0);
    event(both.channels[1], RDMA_CM_EVENT_ESTABLISHED, |event| {
        assert_eq!(event.id, request);
    });
    let again = notify(request, IBV_EVENT_COMM_EST);
    assert_eq!((again, errno()), (-1, libc::EINVAL));
    destroy_id(request);
}

/// Calls `rdma_getaddrinfo` with a GID.
fn gid_info(gid: &CStr, port: u16, space: rdma_port_space, flags: u32) -> *mut rdma_addrinfo {
    let mut hints = hints(space, IBV_QPT_RC, RAI_NUMERICHOST | RAI_FAMILY | flags);
    hints.ai_family = AF_IB as c_int;
    address_info(Some(gid), port, &hints).unwrap()
}

/// Returns the GID, service ID and mask of an InfiniBand address.
fn infiniband(addr: *const sockaddr) -> (Vec<u8>, u64, u64) {
    // SAFETY: the address is alive, and its family is checked first.
    unsafe {
        assert_eq!(u32::from((*addr).sa_family), AF_IB);
        let ib = addr.cast::<sockaddr_ib>().read_unaligned();
        assert_eq!(u16::from_be(ib.sib_pkey), 0xffff);
        let gid = ib.sib_addr.ib_u.uib_addr8.to_vec();
        (gid, u64::from_be(ib.sib_sid), u64::from_be(ib.sib_sid_mask))
    }
}

/// Returns the local and the peer address of an identifier.
fn addresses(id: *mut rdma_cm_id) -> [*const sockaddr; 2] {
    // SAFETY: the identifier is alive.
    unsafe {
        let addr = &raw const (*id).route.addr;
        [
            (&raw const (*addr).__bindgen_anon_1).cast(),
            (&raw const (*addr).__bindgen_anon_2).cast(),
        ]
    }
}

fn resolve_addr(id: *mut rdma_cm_id, src: *mut sockaddr, dst: *mut sockaddr) -> c_int {
    call!(rdma_resolve_addr(id => *mut rdma_cm_id, src => *mut sockaddr, dst => *mut sockaddr,
        1000 => c_int) -> c_int)
}

fn bind(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    call!(rdma_bind_addr(id => *mut rdma_cm_id, addr => *mut sockaddr) -> c_int)
}

fn set_path(id: *mut rdma_cm_id, paths: &mut [ibv_path_data], length: usize) -> c_int {
    call!(rdma_set_option(id => *mut rdma_cm_id, RDMA_OPTION_IB as c_int => c_int,
        RDMA_OPTION_IB_PATH as c_int => c_int, paths.as_mut_ptr().cast() => *mut c_void,
        length => usize) -> c_int)
}

#[test]
fn ib_addresses_are_supported() {
    const GID: &CStr = c"::ffff:127.0.41.2";
    const TCP: u64 = 0x0106_0000;
    let mut raw = vec![0; 10];
    raw.extend([0xff, 0xff, 127, 0, 41, 2]);
    let passive = gid_info(GID, 7006, RDMA_PS_TCP, RAI_PASSIVE);
    let active = gid_info(GID, 7006, RDMA_PS_TCP, 0);
    // SAFETY: both are alive.
    let (own, peer) = unsafe {
        assert_eq!((*passive).ai_family, AF_IB as c_int);
        assert_eq!(
            ((*passive).ai_src_len, (*active).ai_dst_len),
            (size_of::<sockaddr_ib>() as u32, 48)
        );
        ((*passive).ai_src_addr, (*active).ai_dst_addr)
    };
    assert_eq!(infiniband(own), (raw.clone(), TCP | 7006, !0));
    assert_eq!(infiniband(peer), (raw.clone(), TCP | 7006, !0));

    let channels = [create_channel(), create_channel()];
    let datagrams = create_id(channels[1], RDMA_PS_UDP);
    let refused = bind(datagrams, own);
    assert_eq!((refused, errno()), (-1, libc::EPROTONOSUPPORT));
    destroy_id(datagrams);
    let listener = create_id(channels[1], RDMA_PS_TCP);
    assert_eq!(bind(listener, own), 0, "{}", errno());
    assert_eq!(
        infiniband(addresses(listener)[0]),
        (raw.clone(), TCP | 7006, !0)
    );
    listen(listener);

    let id = create_id(channels[0], RDMA_PS_TCP);
    // Addresses of different families.
    let internet = address_info(Some(c"127.0.41.1"), 0, &hints(RDMA_PS_TCP, IBV_QPT_RC, 0));
    let internet = internet.unwrap();
    // SAFETY: it is alive.
    let mixed = resolve_addr(id, unsafe { (*internet).ai_dst_addr }, peer);
    assert_eq!((mixed, errno()), (-1, libc::EINVAL));
    assert_eq!(resolve_addr(id, ptr::null_mut(), peer), 0, "{}", errno());
    event(channels[0], RDMA_CM_EVENT_ADDR_RESOLVED, |_| ());
    let (own_gid, own_sid, own_mask) = infiniband(addresses(id)[0]);
    assert_eq!(
        (&own_gid[10..], own_mask),
        (&[0xff, 0xff, 127, 0, 41, 1][..], !0)
    );
    let port = u16::from_be(call!(rdma_get_src_port(id => *mut rdma_cm_id) -> u16));
    assert_eq!(own_sid, TCP | u64::from(port));
    assert_eq!(infiniband(addresses(id)[1]), (raw.clone(), TCP | 7006, !0));
    let port = u16::from_be(call!(rdma_get_dst_port(id => *mut rdma_cm_id) -> u16));
    assert_eq!(port, 7006);

    // The path is set by the program.
    // SAFETY: all zeroes is valid, and the identifier is alive.
    let mut data = unsafe {
        let mut data: [ibv_path_data; 2] = zeroed();
        let path = &mut data[1].path;
        let ids = (*id).route.addr.addr.ibaddr;
        (path.sgid, path.dgid, path.pkey) = (ids.sgid, ids.dgid, ids.pkey);
        path.mtu = 2 << 6 | IBV_MTU_512 as u8;
        path.tclass = 0x28;
        data[1].flags = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;
        data
    };
    let size = size_of::<ibv_path_data>();
    for length in [0, 1, size - 1, size] {
        let refused = set_path(id, &mut data, length);
        assert_eq!((refused, errno()), (-1, libc::EINVAL), "{length}");
    }
    let mut elsewhere = data;
    elsewhere[1].path.dgid = data[1].path.sgid;
    let refused = set_path(id, &mut elsewhere, 2 * size);
    assert_eq!((refused, errno()), (-1, libc::EINVAL));
    assert_eq!(set_path(id, &mut data, 2 * size), 0, "{}", errno());
    event(channels[0], RDMA_CM_EVENT_ROUTE_RESOLVED, |_| ());
    // SAFETY: the route is resolved.
    let path = unsafe { *(*id).route.path_rec };
    assert_eq!(
        (u32::from(path.mtu), path.traffic_class),
        (IBV_MTU_512, 0x28)
    );
    let again = set_path(id, &mut data, 2 * size);
    assert_eq!((again, errno()), (-1, libc::EINVAL));

    // Because there is no address header, the program can use all of the private data.
    let all: [u8; 92] = std::array::from_fn(|i| i as u8 + 1);
    let mut param = numbered(77);
    (param.private_data, param.private_data_len) = (all.as_ptr().cast(), 92);
    connect(id, &mut param);
    let request = event(channels[1], RDMA_CM_EVENT_CONNECT_REQUEST, |event| {
        // SAFETY: the event has private data.
        unsafe {
            let conn = event.param.conn;
            assert_eq!(conn.private_data_len, 92);
            assert_eq!(conn.private_data.cast::<[u8; 92]>().read(), all);
        }
        event.id
    });
    assert_eq!(infiniband(addresses(request)[0]), (raw, TCP | 7006, !0));
    assert_eq!(infiniband(addresses(request)[1]).0, own_gid);
    // SAFETY: all zeroes are valid attributes. Only the state is read.
    unsafe {
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = IBV_QPS_RTR;
        let mut mask = 0;
        let known = call!(rdma_init_qp_attr(request => *mut rdma_cm_id,
            &raw mut attr => *mut ibv_qp_attr, &raw mut mask => *mut c_int) -> c_int);
        assert_eq!(known, 0, "{}", errno());
        assert_eq!(attr.path_mtu, IBV_MTU_512);
        assert_eq!(attr.ah_attr.grh.traffic_class, 0x28);
    }
    destroy_id(request);
    destroy_id(id);

    // A destination can have any service ID. There is no listener for this one.
    let bare = create_id(channels[0], RDMA_PS_IB);
    // SAFETY: the address is alive.
    unsafe { (*peer.cast::<sockaddr_ib>()).sib_sid = 0x1000_0000_0000_0077_u64.to_be() };
    assert_eq!(resolve_addr(bare, ptr::null_mut(), peer), 0, "{}", errno());
    event(channels[0], RDMA_CM_EVENT_ADDR_RESOLVED, |_| ());
    let begun = call!(rdma_resolve_route(bare => *mut rdma_cm_id, 1000 => c_int) -> c_int);
    assert_eq!(begun, 0);
    event(channels[0], RDMA_CM_EVENT_ROUTE_RESOLVED, |_| ());
    connect(bare, &mut numbered(77));
    // Reason 8: invalid service ID.
    event_with(channels[0], (RDMA_CM_EVENT_REJECTED, 8), |_| ());
    destroy_id(bare);
    destroy_id(listener);
    channels.into_iter().for_each(destroy_channel);
    for info in [passive, active, internet] {
        call!(rdma_freeaddrinfo(info => *mut rdma_addrinfo));
    }
}

#[test]
fn unspecified_address_shows_no_device() {
    let channel = create_channel();
    // SAFETY: all zeroes is the unspecified IPv4 address, except for the family.
    let mut any: sockaddr_in = unsafe { zeroed() };
    any.sin_family = libc::AF_INET as u16;
    any.sin_port = 7007u16.to_be();
    let listener = create_id(channel, RDMA_PS_TCP);
    assert_eq!(bind(listener, (&raw mut any).cast()), 0, "{}", errno());
    let unbound = create_id(channel, RDMA_PS_TCP);
    for (id, port) in [(listener, 7007), (unbound, 0)] {
        listen(id);
        // SAFETY: the identifier is alive.
        unsafe {
            assert!((*id).verbs.is_null() && (*id).pd.is_null());
            assert_eq!((*id).port_num, 0);
            let shown = addresses(id)[0].cast::<sockaddr_in>().read_unaligned();
            assert_eq!(i32::from(shown.sin_family), libc::AF_INET);
            assert_eq!(shown.sin_addr.s_addr, 0);
            let shown = u16::from_be(shown.sin_port);
            assert!(
                if port == 0 {
                    shown >= 32_768
                } else {
                    shown == port
                },
                "{shown}"
            );
        }
    }
    // If it resolves an address, it uses the device of the route.
    let id = create_id(channel, RDMA_PS_TCP);
    any.sin_port = 0;
    assert_eq!(bind(id, (&raw mut any).cast()), 0, "{}", errno());
    let info = address_info(Some(SERVER), 7007, &hints(RDMA_PS_TCP, IBV_QPT_RC, 0)).unwrap();
    // SAFETY: the information and the identifier are alive.
    unsafe {
        assert_eq!(resolve_addr(id, ptr::null_mut(), (*info).ai_dst_addr), 0);
        event(channel, RDMA_CM_EVENT_ADDR_RESOLVED, |_| ());
        assert!(!(*id).verbs.is_null());
        let shown = addresses(id)[0].cast::<sockaddr_in>().read_unaligned();
        assert_eq!(shown.sin_addr.s_addr.to_ne_bytes()[..3], [127, 0, 41]);
    }
    call!(rdma_freeaddrinfo(info => *mut rdma_addrinfo));
    for id in [id, unbound, listener] {
        destroy_id(id);
    }
    destroy_channel(channel);
}

#[test]
fn listener_gets_requested_backlog() {
    const BACKLOG: usize = 100;
    let channels = [create_channel(), create_channel()];
    let info = address_info(Some(SERVER), 7008, &hints(RDMA_PS_TCP, IBV_QPT_RC, 0)).unwrap();
    // SAFETY: the information is alive.
    let addr = unsafe { (*info).ai_dst_addr };
    let listener = create_id(channels[1], RDMA_PS_TCP);
    assert_eq!(bind(listener, addr), 0, "{}", errno());
    let listening = call!(rdma_listen(listener => *mut rdma_cm_id, BACKLOG as c_int => c_int)
        -> c_int);
    assert_eq!(listening, 0);
    // All requests are from the same host, and none is accepted before the last has arrived.
    let clients: Vec<_> = (0..BACKLOG)
        .map(|_| {
            let id = create_id(channels[0], RDMA_PS_TCP);
            assert_eq!(resolve_addr(id, ptr::null_mut(), addr), 0);
            event(channels[0], RDMA_CM_EVENT_ADDR_RESOLVED, |_| ());
            call!(rdma_resolve_route(id => *mut rdma_cm_id, 1000 => c_int) -> c_int);
            event(channels[0], RDMA_CM_EVENT_ROUTE_RESOLVED, |_| ());
            connect(id, &mut numbered(77));
            id
        })
        .collect();
    let requests: Vec<_> = (0..BACKLOG)
        .map(|_| event(channels[1], RDMA_CM_EVENT_CONNECT_REQUEST, |event| event.id))
        .collect();
    for id in requests.into_iter().chain(clients).chain([listener]) {
        destroy_id(id);
    }
    channels.into_iter().for_each(destroy_channel);
    call!(rdma_freeaddrinfo(info => *mut rdma_addrinfo));
}

#[test]
fn request_waits_after_listener_is_destroyed() {
    let channels = [create_channel(), create_channel()];
    let info = address_info(Some(SERVER), 7010, &hints(RDMA_PS_TCP, IBV_QPT_RC, 0)).unwrap();
    // SAFETY: the information is alive.
    let addr = unsafe { (*info).ai_dst_addr };
    let listener = create_id(channels[1], RDMA_PS_TCP);
    assert_eq!(bind(listener, addr), 0, "{}", errno());
    listen(listener);
    // An identifier that uses the same port for connecting.
    let other = create_id(channels[1], RDMA_PS_TCP);
    assert_eq!(resolve_addr(other, addr, addr), 0, "{}", errno());
    destroy_id(listener);
    let client = create_id(channels[0], RDMA_PS_TCP);
    assert_eq!(resolve_addr(client, ptr::null_mut(), addr), 0);
    event(channels[0], RDMA_CM_EVENT_ADDR_RESOLVED, |_| ());
    call!(rdma_resolve_route(client => *mut rdma_cm_id, 1000 => c_int) -> c_int);
    event(channels[0], RDMA_CM_EVENT_ROUTE_RESOLVED, |_| ());
    // It is rejected after waiting for the other identifier to listen.
    let start = Instant::now();
    connect(client, &mut numbered(77));
    // The IBTA reason for a service ID without a listener.
    event_with(channels[0], (RDMA_CM_EVENT_REJECTED, 8), |_| ());
    assert!(start.elapsed() >= Duration::from_millis(300));
    for id in [client, other] {
        destroy_id(id);
    }
    channels.into_iter().for_each(destroy_channel);
    call!(rdma_freeaddrinfo(info => *mut rdma_addrinfo));
}
