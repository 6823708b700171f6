//! Sequences of librdmacm calls.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::ptr;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use libc::{
    EADDRINUSE, EADDRNOTAVAIL, EAFNOSUPPORT, EAGAIN, EBUSY, EINVAL, EISCONN, ENETUNREACH, ENODEV,
    ENOMEM, ENOSYS, ENOTCONN, EOPNOTSUPP, ETIMEDOUT,
};
use riser_rdma_core_sys::bindings::*;

use super::library::*;
use super::{ADDRESSES, Choices, Pool, check};

/// Number of calls per thread.
const CALLS: usize = 300;

/// Ports shared by threads, and 0 for a port chosen by the library.
const PORTS: [u16; 4] = [7171, 7172, 7173, 0];

/// Errors of calls that use an identifier.
const ERRORS: &[c_int] = &[
    EINVAL,
    ENOMEM,
    EADDRINUSE,
    EADDRNOTAVAIL,
    EAFNOSUPPORT,
    EBUSY,
    EISCONN,
    ENETUNREACH,
    ENODEV,
    ENOTCONN,
    ENOSYS,
    EOPNOTSUPP,
    ETIMEDOUT,
];

/// Objects of a thread.
struct Program {
    choices: Choices,
    channels: Pool<rdma_event_channel>,
    ids: Pool<rdma_cm_id>,
    /// Events that are not acknowledged yet, with the identifier that waits for the
    /// acknowledgement.
    events: Vec<(*mut rdma_cm_event, *mut rdma_cm_id)>,
    /// The channel of each identifier.
    channel_of: HashMap<*mut rdma_cm_id, *mut rdma_event_channel>,
}

/// Runs a sequence: either two threads, which also connect to each other's listeners, or, for every
/// other seed, one thread without listeners.
pub(super) fn run(seed: u64) {
    let threads = 1 + seed % 2;
    let start = Barrier::new(threads as usize);
    std::thread::scope(|scope| {
        for n in 0..threads {
            let start = &start;
            scope.spawn(move || {
                let mut program = Program {
                    choices: Choices::new(2 * seed + n),
                    channels: Pool::new(threads == 1),
                    ids: Pool::new(threads == 1),
                    events: Vec::new(),
                    channel_of: HashMap::new(),
                };
                start.wait();
                for _ in 0..CALLS {
                    program.step();
                }
                program.end();
            });
        }
    });
}

impl Program {
    fn step(&mut self) {
        match self.choices.below(30) {
            24 | 25 => self.serve(),
            26..=29 => self.begin(),
            0 => self.create_channel(),
            1 => self.destroy_channel(),
            2 | 3 => self.create_id(),
            4 => self.destroy_id(),
            5 | 6 => self.bind(),
            7 => self.listen(),
            8 | 9 => self.resolve(),
            10 => self.create_qp(),
            11 => self.destroy_qp(),
            12 | 13 => self.connect(),
            14 => self.simple(),
            15 => self.set_option(),
            16 => self.migrate(),
            17 => self.join(),
            18 => self.acknowledge(),
            _ => self.take_events(),
        }
    }

    fn create_channel(&mut self) {
        self.choices.show("rdma_create_event_channel");
        let channel = call!(rdma_create_event_channel() -> *mut rdma_event_channel);
        assert!(!channel.is_null(), "{}", errno());
        // SAFETY: the channel is alive. No call may block.
        unsafe { libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK) };
        self.channels.add(channel);
    }

    /// Destroys a channel without identifiers, as required by the manual page, or a channel that
    /// was already destroyed.
    fn destroy_channel(&mut self) {
        let channel = self.channels.any(&mut self.choices);
        if self.channel_of.values().any(|used| *used == channel) {
            return;
        }
        self.choices.show("rdma_destroy_event_channel");
        call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
        self.channels.remove(channel);
    }

    fn create_id(&mut self) {
        // Without a channel, the identifier would be synchronous, and its calls would block.
        let Some(channel) = self.channels.reachable(&mut self.choices) else {
            return;
        };
        let space = self.choices.of(&[
            RDMA_PS_TCP,
            RDMA_PS_TCP,
            RDMA_PS_UDP,
            RDMA_PS_IB,
            RDMA_PS_IPOIB,
            0,
            77,
        ]);
        let mut id = ptr::null_mut();
        self.choices.show("rdma_create_id");
        let result = call!(rdma_create_id(channel => *mut rdma_event_channel,
            &raw mut id => *mut *mut rdma_cm_id, ptr::null_mut() => *mut c_void,
            space => rdma_port_space) -> c_int);
        if result == 0 {
            self.ids.add(id);
            self.channel_of.insert(id, channel);
        } else {
            check(
                "rdma_create_id",
                errno(),
                &[EINVAL, ENODEV, ENOMEM, EOPNOTSUPP],
            );
        }
    }

    /// Acknowledges all events that an identifier waits for, because otherwise destroying it would
    /// never return.
    fn acknowledge_of(&mut self, id: *mut rdma_cm_id) {
        let (of_id, rest): (Vec<_>, Vec<_>) =
            self.events.drain(..).partition(|(_, owner)| *owner == id);
        self.events = rest;
        for (event, _) in of_id {
            assert_eq!(
                call!(rdma_ack_cm_event(event => *mut rdma_cm_event) -> c_int),
                0
            );
        }
    }

    fn destroy_id(&mut self) {
        let id = self.ids.any(&mut self.choices);
        self.destroy(id);
    }

    fn destroy(&mut self, id: *mut rdma_cm_id) {
        self.acknowledge_of(id);
        let is_live = self.ids.live.contains(&id);
        self.choices.show(&format!("rdma_destroy_id {id:?}"));
        if is_live {
            // SAFETY: the identifier is alive.
            let has_qp = unsafe { !(*id).qp.is_null() };
            if has_qp {
                call!(rdma_destroy_qp(id => *mut rdma_cm_id));
            }
        }
        let result = call!(rdma_destroy_id(id => *mut rdma_cm_id) -> c_int);
        assert_eq!(result == 0, is_live, "{}", errno());
        if is_live {
            self.ids.remove(id);
            self.channel_of.remove(&id);
        }
    }

    fn address(&mut self) -> sockaddr_in {
        // SAFETY: all zeroes is valid.
        let mut addr: sockaddr_in = unsafe { zeroed() };
        addr.sin_family = self.choices.of(&[libc::AF_INET as u16; 9]);
        if self.choices.once_in(12) {
            addr.sin_family = self.choices.of(&[0, 77, u16::MAX]);
        }
        addr.sin_port = self.choices.of(&PORTS).to_be();
        let other = [[0; 4], [127, 0, 43, 9], [255; 4], [239, 1, 1, 1]];
        let octets = if self.choices.once_in(8) {
            self.choices.of(&other)
        } else {
            self.choices.of(&ADDRESSES)
        };
        addr.sin_addr.s_addr = u32::from_ne_bytes(octets);
        addr
    }

    /// Checks the result of a call that returns 0 or -1.
    #[track_caller]
    fn checked(&self, call: &str, result: c_int) {
        match result {
            0 => {}
            -1 => check(call, errno(), ERRORS),
            other => panic!("{call}: {other}"),
        }
    }

    fn bind(&mut self) {
        let id = self.ids.any(&mut self.choices);
        let mut addr = self.address();
        self.choices.show(&format!("rdma_bind_addr {id:?}"));
        let result = call!(rdma_bind_addr(id => *mut rdma_cm_id,
            &raw mut addr => *mut sockaddr_in) -> c_int);
        self.checked("rdma_bind_addr", result);
    }

    fn listen(&mut self) {
        let id = self.ids.any(&mut self.choices);
        self.listen_with(id);
    }

    fn listen_with(&mut self, id: *mut rdma_cm_id) {
        // A request could reuse the memory of a destroyed identifier.
        if self.ids.uses_gone {
            return;
        }
        let backlog = self.choices.of(&[0, 1, 5, -1, i32::MAX]);
        self.choices.show(&format!("rdma_listen {id:?}"));
        let result = call!(rdma_listen(id => *mut rdma_cm_id, backlog => c_int) -> c_int);
        self.checked("rdma_listen", result);
    }

    fn resolve(&mut self) {
        let id = self.ids.any(&mut self.choices);
        let timeout = self.choices.of(&[100, 2000, 0, -1]);
        if self.choices.once_in(2) {
            self.choices.show(&format!("rdma_resolve_route {id:?}"));
            let result =
                call!(rdma_resolve_route(id => *mut rdma_cm_id, timeout => c_int) -> c_int);
            return self.checked("rdma_resolve_route", result);
        }
        let (mut source, mut dest) = (self.address(), self.address());
        source.sin_port = 0;
        let source = match self.choices.once_in(2) {
            true => &raw mut source,
            false => ptr::null_mut(),
        };
        self.choices.show(&format!("rdma_resolve_addr {id:?}"));
        let result = call!(rdma_resolve_addr(id => *mut rdma_cm_id, source => *mut sockaddr_in,
            &raw mut dest => *mut sockaddr_in, timeout => c_int) -> c_int);
        self.checked("rdma_resolve_addr", result);
    }

    fn create_qp(&mut self) {
        let id = self.ids.any(&mut self.choices);
        // SAFETY: all zeroes is valid.
        let mut attr: ibv_qp_init_attr = unsafe { zeroed() };
        attr.qp_type = self
            .choices
            .of(&[IBV_QPT_RC, IBV_QPT_RC, IBV_QPT_UD, IBV_QPT_UC, 77]);
        attr.cap.max_send_wr = self.choices.of(&[4, 4, 0, u32::MAX]);
        attr.cap.max_recv_wr = 4;
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        self.choices.show(&format!("rdma_create_qp {id:?}"));
        let result = call!(rdma_create_qp(id => *mut rdma_cm_id, ptr::null_mut() => *mut ibv_pd,
            &raw mut attr => *mut ibv_qp_init_attr) -> c_int);
        self.checked("rdma_create_qp", result);
    }

    fn destroy_qp(&mut self) {
        let id = self.ids.any(&mut self.choices);
        self.choices.show(&format!("rdma_destroy_qp {id:?}"));
        call!(rdma_destroy_qp(id => *mut rdma_cm_id));
    }

    fn connect(&mut self) {
        let id = self.ids.any(&mut self.choices);
        let data = [7_u8; 255];
        // SAFETY: all zeroes is valid.
        let mut param: rdma_conn_param = unsafe { zeroed() };
        param.private_data = data.as_ptr().cast();
        param.private_data_len = self.choices.of(&[0, 8, 56, 57, 255]);
        param.responder_resources = self.choices.of(&[0, 1, 16, 255]);
        param.initiator_depth = self.choices.of(&[0, 1, 16, 255]);
        param.retry_count = self.choices.of(&[0, 7, 255]);
        param.rnr_retry_count = self.choices.of(&[0, 7, 255]);
        param.qp_num = self.choices.rng.u32(..);
        let param = match self.choices.once_in(12) {
            true => ptr::null_mut(),
            false => &raw mut param,
        };
        if self.choices.once_in(2) {
            self.choices.show(&format!("rdma_connect {id:?}"));
            let result = call!(rdma_connect(id => *mut rdma_cm_id,
                param => *mut rdma_conn_param) -> c_int);
            self.checked("rdma_connect", result);
        } else {
            self.choices.show(&format!("rdma_accept {id:?}"));
            let result = call!(rdma_accept(id => *mut rdma_cm_id,
                param => *mut rdma_conn_param) -> c_int);
            self.checked("rdma_accept", result);
        }
    }

    /// Calls that take an identifier and few other arguments.
    fn simple(&mut self) {
        let id = self.ids.any(&mut self.choices);
        match self.choices.below(5) {
            0 => {
                self.choices.show(&format!("rdma_disconnect {id:?}"));
                let result = call!(rdma_disconnect(id => *mut rdma_cm_id) -> c_int);
                self.checked("rdma_disconnect", result);
            }
            1 => {
                self.choices.show(&format!("rdma_reject {id:?}"));
                let data = [0_u8; 255];
                let length = self.choices.of(&[0, 10, 148, 149, 255]);
                let result = call!(rdma_reject(id => *mut rdma_cm_id,
                    data.as_ptr().cast() => *const c_void, length => u8) -> c_int);
                self.checked("rdma_reject", result);
            }
            2 => {
                self.choices.show(&format!("rdma_notify {id:?}"));
                let event = self
                    .choices
                    .of(&[IBV_EVENT_COMM_EST, IBV_EVENT_QP_FATAL, 77]);
                let result =
                    call!(rdma_notify(id => *mut rdma_cm_id, event => ibv_event_type) -> c_int);
                self.checked("rdma_notify", result);
            }
            3 => {
                self.choices.show(&format!("rdma_establish {id:?}"));
                let result = call!(rdma_establish(id => *mut rdma_cm_id) -> c_int);
                self.checked("rdma_establish", result);
            }
            _ => {
                self.choices.show(&format!("rdma_init_qp_attr {id:?}"));
                // SAFETY: all zeroes is valid.
                let mut attr: ibv_qp_attr = unsafe { zeroed() };
                attr.qp_state = self
                    .choices
                    .of(&[IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, 77]);
                let mut mask = 0;
                let result = call!(rdma_init_qp_attr(id => *mut rdma_cm_id,
                    &raw mut attr => *mut ibv_qp_attr, &raw mut mask => *mut c_int) -> c_int);
                self.checked("rdma_init_qp_attr", result);
            }
        }
    }

    fn set_option(&mut self) {
        let id = self.ids.any(&mut self.choices);
        let level = self.choices.of(&[0, 0, 1, 77]);
        let name = self.choices.of(&[0, 1, 2, 3, 77]);
        let mut value = self.choices.of(&[0_u64, 1, u64::MAX]);
        let length = self.choices.of(&[1_usize, 4, 8, 0]);
        self.choices.show(&format!("rdma_set_option {id:?}"));
        let result = call!(rdma_set_option(id => *mut rdma_cm_id, level => c_int, name => c_int,
            (&raw mut value).cast() => *mut c_void, length => usize) -> c_int);
        self.checked("rdma_set_option", result);
    }

    /// Moves an identifier to another channel. All its events must be acknowledged first.
    fn migrate(&mut self) {
        let id = self.ids.any(&mut self.choices);
        let Some(channel) = self.channels.reachable(&mut self.choices) else {
            return;
        };
        self.acknowledge_of(id);
        self.choices.show(&format!("rdma_migrate_id {id:?}"));
        let result = call!(rdma_migrate_id(id => *mut rdma_cm_id,
            channel => *mut rdma_event_channel) -> c_int);
        self.checked("rdma_migrate_id", result);
        if result == 0 {
            self.channel_of.insert(id, channel);
        }
    }

    fn join(&mut self) {
        let id = self.ids.any(&mut self.choices);
        let mut addr = self.address();
        addr.sin_addr.s_addr = u32::from_ne_bytes([239, 255, 43, 7]);
        self.choices.show(&format!("rdma_join_multicast {id:?}"));
        let result = call!(rdma_join_multicast(id => *mut rdma_cm_id,
            &raw mut addr => *mut sockaddr_in, ptr::null_mut() => *mut c_void) -> c_int);
        self.checked("rdma_join_multicast", result);
        if self.choices.once_in(2) {
            let result = call!(rdma_leave_multicast(id => *mut rdma_cm_id,
                &raw mut addr => *mut sockaddr_in) -> c_int);
            self.checked("rdma_leave_multicast", result);
        }
    }

    /// Listens on an address that clients connect to.
    fn serve(&mut self) {
        let Some(id) = self.ids.live(&mut self.choices) else {
            return;
        };
        let mut addr = self.peer();
        self.choices.show(&format!("rdma_bind_addr {id:?}"));
        let result = call!(rdma_bind_addr(id => *mut rdma_cm_id,
            &raw mut addr => *mut sockaddr_in) -> c_int);
        self.checked("rdma_bind_addr", result);
        self.listen_with(id);
    }

    /// Starts to connect to an address that servers listen on. The following steps are triggered by
    /// events.
    fn begin(&mut self) {
        let Some(id) = self.ids.live(&mut self.choices) else {
            return;
        };
        let mut addr = self.peer();
        self.choices.show(&format!("rdma_resolve_addr {id:?}"));
        let result = call!(rdma_resolve_addr(id => *mut rdma_cm_id,
            ptr::null_mut() => *mut sockaddr_in, &raw mut addr => *mut sockaddr_in,
            1000 => c_int) -> c_int);
        self.checked("rdma_resolve_addr", result);
    }

    /// Returns a device's address with a port that is known to all threads.
    fn peer(&mut self) -> sockaddr_in {
        // SAFETY: all zeroes is valid.
        let mut addr: sockaddr_in = unsafe { zeroed() };
        addr.sin_family = libc::AF_INET as u16;
        addr.sin_port = self.choices.of(&PORTS[..3]).to_be();
        addr.sin_addr.s_addr = u32::from_ne_bytes(self.choices.of(&ADDRESSES));
        addr
    }

    /// Responds to an event like a program would.
    fn follow(&mut self, kind: rdma_cm_event_type, id: *mut rdma_cm_id) {
        self.choices.show(&format!("event {kind} of {id:?}"));
        let result = match kind {
            RDMA_CM_EVENT_ADDR_RESOLVED => {
                call!(rdma_resolve_route(id => *mut rdma_cm_id, 1000 => c_int) -> c_int)
            }
            RDMA_CM_EVENT_ROUTE_RESOLVED | RDMA_CM_EVENT_CONNECT_REQUEST => {
                // SAFETY: all zeroes is valid.
                let (mut attr, mut param): (ibv_qp_init_attr, rdma_conn_param) =
                    unsafe { (zeroed(), zeroed()) };
                attr.qp_type = IBV_QPT_RC;
                attr.cap.max_send_wr = 4;
                attr.cap.max_recv_wr = 4;
                attr.cap.max_send_sge = 1;
                attr.cap.max_recv_sge = 1;
                let made = call!(rdma_create_qp(id => *mut rdma_cm_id,
                    ptr::null_mut() => *mut ibv_pd,
                    &raw mut attr => *mut ibv_qp_init_attr) -> c_int);
                self.checked("rdma_create_qp", made);
                param.qp_num = 77;
                param.retry_count = 7;
                let param = &raw mut param;
                match kind {
                    RDMA_CM_EVENT_ROUTE_RESOLVED => call!(rdma_connect(id => *mut rdma_cm_id,
                        param => *mut rdma_conn_param) -> c_int),
                    _ if self.choices.once_in(5) => call!(rdma_reject(id => *mut rdma_cm_id,
                        ptr::null_mut() => *mut c_void, 0 => u8) -> c_int),
                    _ => call!(rdma_accept(id => *mut rdma_cm_id,
                        param => *mut rdma_conn_param) -> c_int),
                }
            }
            RDMA_CM_EVENT_DISCONNECTED => {
                call!(rdma_disconnect(id => *mut rdma_cm_id) -> c_int)
            }
            RDMA_CM_EVENT_ESTABLISHED if self.choices.once_in(2) => {
                call!(rdma_disconnect(id => *mut rdma_cm_id) -> c_int)
            }
            _ => 0,
        };
        self.checked("response to an event", result);
    }

    /// Receives an event, which is acknowledged either now or later.
    fn take_events(&mut self) {
        let channel = self.channels.any(&mut self.choices);
        self.take_event(channel);
        if self.choices.once_in(2) {
            self.acknowledge();
        }
    }

    fn take_event(&mut self, channel: *mut rdma_event_channel) -> bool {
        let mut event: *mut rdma_cm_event = ptr::null_mut();
        self.choices.show("rdma_get_cm_event");
        let result = call!(rdma_get_cm_event(channel => *mut rdma_event_channel,
            &raw mut event => *mut *mut rdma_cm_event) -> c_int);
        if result != 0 {
            check("rdma_get_cm_event", errno(), &[EAGAIN, EINVAL]);
            return false;
        }
        // SAFETY: the event is alive until it is acknowledged.
        let (kind, id, listener) = unsafe { ((*event).event, (*event).id, (*event).listen_id) };
        if kind == RDMA_CM_EVENT_CONNECT_REQUEST {
            self.ids.add(id);
            self.channel_of.insert(id, channel);
            assert!(self.ids.live.contains(&listener), "the listener is gone");
            self.events.push((event, listener));
        } else {
            assert!(self.ids.live.contains(&id), "an event of one that is gone");
            self.events.push((event, id));
        }
        if !self.choices.once_in(3) {
            self.follow(kind, id);
        }
        true
    }

    fn acknowledge(&mut self) {
        if self.events.is_empty() {
            let result = call!(rdma_ack_cm_event(ptr::null_mut() => *mut rdma_cm_event) -> c_int);
            assert_eq!((result, errno()), (-1, EINVAL));
            return;
        }
        let at = self.choices.below(self.events.len());
        let (event, _) = self.events.swap_remove(at);
        self.choices.show("rdma_ack_cm_event");
        let result = call!(rdma_ack_cm_event(event => *mut rdma_cm_event) -> c_int);
        assert_eq!(result, 0);
    }

    /// Destroys all objects, in any order.
    fn end(&mut self) {
        self.choices.show("end");
        while !self.ids.live.is_empty() {
            let id = self.ids.live[self.choices.below(self.ids.live.len())];
            self.destroy(id);
        }
        assert!(self.events.is_empty());
        for channel in self.channels.live.clone() {
            // Events of destroyed identifiers were dropped with them.
            let start = Instant::now();
            while self.take_event(channel) {
                assert!(start.elapsed() < Duration::from_secs(1));
            }
            call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
        }
    }
}
