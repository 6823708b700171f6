//! A device whose interface disappears and returns, in a separate network namespace.

#![allow(unsafe_code, reason = "a C interface is called")]
#![allow(unused_unsafe, reason = "calls have blocks of their own")]

mod library;

use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::process::Command;
use std::ptr;
use std::time::Duration;

use library::*;
use riser_rdma_core_sys::bindings::*;
use riser_testkit::eventually;
use riser_testkit::skip::skip;

const ADDRESS: [u8; 4] = [10, 9, 1, 1];

fn ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status();
    assert!(status.unwrap().success(), "ip {words}");
}

/// Creates an interface with the device's address.
fn lay() {
    ip("link add v0 type veth peer name v1");
    ip("addr add 10.9.1.1/24 dev v0");
    ip("link set v0 up");
    ip("link set v1 up");
}

/// Waits for the next asynchronous event of a context.
fn event(context: *mut ibv_context) -> ibv_event_type {
    // SAFETY: the context is alive, and the structures have enough space for the results.
    unsafe {
        let mut fd = libc::pollfd {
            fd: (*context).async_fd,
            events: libc::POLLIN,
            revents: 0,
        };
        assert_eq!(libc::poll(&raw mut fd, 1, 20_000), 1, "an event");
        let mut event: ibv_async_event = zeroed();
        assert_eq!(
            call!(ibv_get_async_event(context => *mut ibv_context,
                &raw mut event => *mut ibv_async_event) -> c_int),
            0
        );
        call!(ibv_ack_async_event(&raw mut event => *mut ibv_async_event));
        event.event_type
    }
}

/// Waits for an event, ignoring all other events.
fn wait_for(context: *mut ibv_context, wanted: ibv_event_type) {
    while event(context) != wanted {}
}

/// Returns the state of the port, or the error.
fn port_state(context: *mut ibv_context) -> Result<ibv_port_state, c_int> {
    // SAFETY: all zeroes is valid.
    let mut attr: ibv_port_attr = unsafe { zeroed() };
    let result = call!(ibv_query_port(context => *mut ibv_context, 1 => u8,
        &raw mut attr => *mut ibv_port_attr) -> c_int);
    match result {
        0 => Ok(attr.state),
        error => Err(error),
    }
}

/// Waits until the port is active. The kernel may report the state of an interface late.
fn wait_until_active(context: *mut ibv_context) {
    eventually("an active port", Duration::from_secs(20), || {
        port_state(context) == Ok(IBV_PORT_ACTIVE)
    });
}

/// Returns an Internet address.
fn internet(addr: [u8; 4], port: u16) -> libc::sockaddr_in {
    // SAFETY: all zeroes is valid.
    let mut socket: libc::sockaddr_in = unsafe { zeroed() };
    socket.sin_family = libc::AF_INET as _;
    socket.sin_port = port.to_be();
    socket.sin_addr.s_addr = u32::from_ne_bytes(addr);
    socket
}

/// Creates an identifier with a separate channel.
fn identifier() -> (*mut rdma_event_channel, *mut rdma_cm_id) {
    let channel = call!(rdma_create_event_channel() -> *mut rdma_event_channel);
    let mut id: *mut rdma_cm_id = ptr::null_mut();
    let created = call!(rdma_create_id(channel => *mut rdma_event_channel,
        &raw mut id => *mut *mut rdma_cm_id, ptr::null_mut() => *mut c_void,
        RDMA_PS_TCP => rdma_port_space) -> c_int);
    assert_eq!(created, 0);
    (channel, id)
}

/// Creates an identifier that is bound to an address, and its channel.
fn bound_to(addr: [u8; 4], port: u16) -> (*mut rdma_event_channel, *mut rdma_cm_id) {
    let (channel, id) = identifier();
    let addr = internet(addr, port);
    let addr = (&raw const addr).cast();
    let result = call!(rdma_bind_addr(id => *mut rdma_cm_id, addr => *const c_void) -> c_int);
    assert_eq!(result, 0, "{}", errno());
    (channel, id)
}

/// Same as [`bound_to`], using the device's address.
fn bound() -> (*mut rdma_event_channel, *mut rdma_cm_id) {
    bound_to(ADDRESS, 7471)
}

fn listen(id: *mut rdma_cm_id) -> c_int {
    call!(rdma_listen(id => *mut rdma_cm_id, 1 => c_int) -> c_int)
}

fn destroy(channel: *mut rdma_event_channel, id: *mut rdma_cm_id) {
    assert_eq!(call!(rdma_destroy_id(id => *mut rdma_cm_id) -> c_int), 0);
    call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
}

/// Returns the next event of the connection manager, with its identifier and its listener, or
/// `None` after a timeout.
fn cm_event(
    channel: *mut rdma_event_channel,
    wait: Duration,
) -> Option<(rdma_cm_event_type, *mut rdma_cm_id, *mut rdma_cm_id)> {
    cm_event_with(channel, wait, |event| {
        (event.event, event.id, event.listen_id)
    })
}

/// Same as [`cm_event`], but returns the result of `look`.
fn cm_event_with<T>(
    channel: *mut rdma_event_channel,
    wait: Duration,
    look: impl FnOnce(&rdma_cm_event) -> T,
) -> Option<T> {
    // SAFETY: the channel is alive, and the event belongs to the program until it is acknowledged.
    unsafe {
        let mut fd = libc::pollfd {
            fd: (*channel).fd,
            events: libc::POLLIN,
            revents: 0,
        };
        if libc::poll(&raw mut fd, 1, wait.as_millis() as c_int) == 0 {
            return None;
        }
        let mut event: *mut rdma_cm_event = ptr::null_mut();
        let taken = call!(rdma_get_cm_event(channel => *mut rdma_event_channel,
            &raw mut event => *mut *mut rdma_cm_event) -> c_int);
        assert_eq!(taken, 0);
        let shown = look(&*event);
        call!(rdma_ack_cm_event(event => *mut rdma_cm_event) -> c_int);
        Some(shown)
    }
}

/// A listener on all devices.
struct Listener {
    channel: *mut rdma_event_channel,
    id: *mut rdma_cm_id,
    port: u16,
}

impl Listener {
    fn new(port: u16) -> Self {
        let (channel, id) = bound_to([0; 4], port);
        assert_eq!(listen(id), 0, "{}", errno());
        Self { channel, id, port }
    }

    /// Returns the number of the next request that it receives, or `None` after a timeout.
    fn request(&self, wait: Duration) -> Option<u8> {
        let (event, number) = cm_event_with(self.channel, wait, |event| {
            // SAFETY: a request has the private data that was set by its client.
            let number = unsafe { *event.param.conn.private_data.cast::<u8>() };
            ((event.event, event.id, event.listen_id), number)
        })?;
        let (kind, request, listener) = event;
        assert_eq!(kind, RDMA_CM_EVENT_CONNECT_REQUEST);
        assert_eq!(listener, self.id);
        let destroyed = call!(rdma_destroy_id(request => *mut rdma_cm_id) -> c_int);
        assert_eq!(destroyed, 0);
        Some(number)
    }

    /// Returns whether it receives a request with this number from the device itself.
    fn is_reached(&self, number: u8, seen: &mut Vec<u8>) -> bool {
        let (channel, id) = identifier();
        let addr = internet(ADDRESS, self.port);
        let next = || cm_event(channel, Duration::from_secs(20)).unwrap().0;
        let resolved = call!(rdma_resolve_addr(id => *mut rdma_cm_id, ptr::null() => *const c_void,
            (&raw const addr).cast() => *const c_void, 1000 => c_int) -> c_int);
        assert_eq!(resolved, 0, "{}", errno());
        assert_eq!(next(), RDMA_CM_EVENT_ADDR_RESOLVED);
        call!(rdma_resolve_route(id => *mut rdma_cm_id, 1000 => c_int) -> c_int);
        assert_eq!(next(), RDMA_CM_EVENT_ROUTE_RESOLVED);
        // SAFETY: all zeroes is valid.
        let mut param: rdma_conn_param = unsafe { zeroed() };
        param.qp_num = 77;
        (param.private_data, param.private_data_len) = ((&raw const number).cast(), 1);
        let result = call!(rdma_connect(id => *mut rdma_cm_id,
            &raw mut param => *mut rdma_conn_param) -> c_int);
        assert_eq!(result, 0, "{}", errno());
        // Requests of earlier rounds may be late.
        while !seen.contains(&number)
            && let Some(request) = self.request(Duration::from_secs(1))
        {
            assert!(!seen.contains(&request), "request {request} has come twice");
            seen.push(request);
        }
        destroy(channel, id);
        seen.contains(&number)
    }

    /// Waits until it receives requests, and checks that there are no other events.
    fn wait(&self) {
        let what = "a listener on the device";
        let (mut number, mut seen) = (0, Vec::new());
        eventually(what, Duration::from_secs(20), || {
            number += 1;
            self.is_reached(number, &mut seen)
        });
        while let Some(late) = self.request(Duration::ZERO) {
            assert!(!seen.contains(&late), "request {late} has come twice");
            seen.push(late);
        }
    }
}

/// A program that does not use the connection manager closes a removed device and opens it again.
fn close_and_open_again() {
    let old = Device::open("riser0");
    wait_until_active(old.context);
    ip("link del v0");
    wait_for(old.context, IBV_EVENT_DEVICE_FATAL);
    let close = |device: &Device| {
        assert_eq!(call!(ibv_dealloc_pd(device.pd => *mut ibv_pd) -> c_int), 0);
        assert_eq!(
            call!(ibv_close_device(device.context => *mut ibv_context) -> c_int),
            0
        );
    };
    close(&old);
    lay();
    close(&Device::open("riser0"));
}

#[test]
fn removed_device_fails_and_returns() {
    // SAFETY: this only unshares the network of this thread.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        let why = std::io::Error::last_os_error().to_string();
        return skip("a network namespace", &why);
    }
    ip("link set lo up");
    lay();
    // SAFETY: this is the only test of its process.
    unsafe { std::env::set_var("RISER_TEST_DEVICES", "riser0=10.9.1.1") };
    close_and_open_again();
    let device = Device::open("riser0");
    let context = device.context;
    let cq = device.create_cq(10);
    let qp = device.create_qp_ex(&mut device.qp_attr(cq, IBV_QPT_UD, IBV_QP_EX_WITH_SEND));
    to_rts(qp, device.gid(), 0);
    let mut memory = [0u8; 64];
    let mr = device.register(&mut memory);
    post_recv(qp, 7, Some(sge(mr, 0, 64)));
    let (channel, id) = bound();
    let before = Listener::new(7472);
    before.wait();

    wait_until_active(context);
    ip("link set v0 down");
    wait_for(context, IBV_EVENT_PORT_ERR);
    assert_eq!(port_state(context), Ok(IBV_PORT_DOWN));
    ip("link set v0 up");
    wait_for(context, IBV_EVENT_PORT_ACTIVE);
    ip("addr del 10.9.1.1/24 dev v0");
    wait_for(context, IBV_EVENT_GID_CHANGE);
    wait_for(context, IBV_EVENT_PORT_ERR);
    ip("addr add 10.9.1.1/24 dev v0");
    wait_for(context, IBV_EVENT_PORT_ACTIVE);

    ip("link del v0");
    wait_for(context, IBV_EVENT_DEVICE_FATAL);
    let flushed = completions(cq, 1);
    assert_eq!(
        (flushed[0].wr_id, flushed[0].status),
        (7, IBV_WC_WR_FLUSH_ERR)
    );
    post_recv(qp, 8, Some(sge(mr, 0, 64)));
    assert_eq!(completions(cq, 1)[0].status, IBV_WC_WR_FLUSH_ERR);
    assert!(call!(ibv_alloc_pd(context => *mut ibv_context) -> *mut ibv_pd).is_null());
    assert_eq!(errno(), libc::EIO);
    assert_eq!(port_state(context), Err(libc::EIO));
    // SAFETY: all zeroes is valid.
    let mut attr: ibv_qp_attr = unsafe { zeroed() };
    attr.qp_state = IBV_QPS_RESET;
    let modified = call!(ibv_modify_qp(qp => *mut ibv_qp, &raw mut attr => *mut ibv_qp_attr,
        IBV_QP_STATE as c_int => c_int) -> c_int);
    assert_eq!(modified, libc::EIO);

    let removal = cm_event(channel, Duration::from_secs(20));
    let expected = (RDMA_CM_EVENT_DEVICE_REMOVAL, id, ptr::null_mut());
    assert_eq!(removal, Some(expected));
    assert_eq!(listen(id), -1);
    // A listener on all devices waits for devices that may return.
    assert_eq!(cm_event(before.channel, Duration::ZERO), None);
    let meanwhile = Listener::new(7473);

    // The address does not exist until the interface returns. Objects of the old device may still
    // exist after that.
    let mut count = 0;
    let list = call!(ibv_get_device_list(&raw mut count => *mut c_int) -> *mut *mut ibv_device);
    // SAFETY: the list has one device.
    let open = || call!(ibv_open_device(unsafe { *list } => *mut ibv_device) -> *mut ibv_context);
    assert!(open().is_null());
    assert_eq!(errno(), libc::EADDRNOTAVAIL);
    lay();
    let again = Device::open("riser0");
    assert_ne!(again.context, context);
    wait_until_active(again.context);
    let (other_channel, other) = bound();
    assert_eq!(
        port_state(context),
        Err(libc::EIO),
        "the old one stays removed"
    );

    destroy(channel, id);
    assert_eq!(listen(other), 0);
    destroy(other_channel, other);
    for listener in [before, meanwhile] {
        listener.wait();
        destroy(listener.channel, listener.id);
    }
    assert_eq!(call!(ibv_destroy_qp(qp => *mut ibv_qp) -> c_int), 0);
    assert_eq!(call!(ibv_destroy_cq(cq => *mut ibv_cq) -> c_int), 0);
    assert_eq!(call!(ibv_dereg_mr(mr => *mut ibv_mr) -> c_int), 0);
    assert_eq!(call!(ibv_dealloc_pd(device.pd => *mut ibv_pd) -> c_int), 0);
    assert_eq!(
        call!(ibv_close_device(context => *mut ibv_context) -> c_int),
        0
    );
    assert_eq!(call!(ibv_dealloc_pd(again.pd => *mut ibv_pd) -> c_int), 0);
    assert_eq!(
        call!(ibv_close_device(again.context => *mut ibv_context) -> c_int),
        0
    );
}
