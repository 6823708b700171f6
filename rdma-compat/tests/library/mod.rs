//! The library, as loaded by a program, and two connected queue pairs.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::mem::{offset_of, zeroed};
use std::ptr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use riser_rdma_core_sys::bindings::*;

/// Timeout for completions.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Handle of the dynamic linker.
struct Handle(*mut c_void);
// SAFETY: the handle can be used by any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// Returns the address of an exported function, at its default version.
pub(crate) fn address(name: &str) -> *mut c_void {
    static LIBRARY: OnceLock<Handle> = OnceLock::new();
    let Handle(library) = LIBRARY.get_or_init(|| {
        // SAFETY: this is reached by the first call of each test, while no other thread reads the
        // environment.
        unsafe {
            let devices = std::env::var("RISER_TEST_DEVICES");
            let both = "riser0=127.0.41.1,riser1=127.0.41.2".to_owned();
            std::env::set_var("RISER_DEVICES", devices.unwrap_or(both));
        }
        // Cargo puts it into the same directory as the tests.
        let path = std::env::current_exe().unwrap();
        let path = path.with_file_name("libriser_drop_in.so");
        let path = CString::new(path.into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: loading the library has no preconditions.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "{path:?} can be loaded");
        Handle(library)
    });
    let name = CString::new(name).unwrap();
    // SAFETY: the library stays loaded.
    let address = unsafe { libc::dlsym(*library, name.as_ptr()) };
    assert!(!address.is_null(), "the library has {name:?}");
    address
}

/// Loads the library. Must be called before a fork, because a child would wait forever for a thread
/// of its parent that is loading the library.
pub(crate) fn load() {
    address("ibv_get_device_list");
}

/// Calls an exported function.
macro_rules! call {
    ($name:ident($($arg:expr => $ty:ty),* $(,)?) $(-> $ret:ty)?) => {{
        type Function = unsafe extern "C" fn($($ty),*) $(-> $ret)?;
        let address = $crate::library::address(stringify!($name));
        // SAFETY: the function has this signature.
        let f = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Function>(address) };
        // SAFETY: the test passes either valid arguments, as required by the manual page, or
        // arguments that the library must reject.
        unsafe { f($($arg),*) }
    }};
}
pub(crate) use call;

/// Returns the error of the last call.
pub(crate) fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

/// An opened device with a protection domain.
pub(crate) struct Device {
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
}

impl Device {
    pub(crate) fn open(name: &str) -> Self {
        let mut count = 0;
        let list = call!(ibv_get_device_list(&raw mut count => *mut c_int)
            -> *mut *mut ibv_device);
        let found = (0..count as usize)
            // SAFETY: the list has this number of devices, and each has a name.
            .map(|i| unsafe { *list.add(i) })
            // SAFETY: as above.
            .find(|&d| unsafe { CStr::from_ptr((*d).name.as_ptr()) }.to_str() == Ok(name));
        let context = call!(ibv_open_device(found.unwrap() => *mut ibv_device)
            -> *mut ibv_context);
        assert!(!context.is_null(), "{name}: {}", errno());
        call!(ibv_free_device_list(list => *mut *mut ibv_device));
        let pd = call!(ibv_alloc_pd(context => *mut ibv_context) -> *mut ibv_pd);
        assert!(!pd.is_null());
        Self { context, pd }
    }

    /// Returns the extended function table. It is located in the same way as in the header's inline
    /// functions.
    pub(crate) fn table(&self) -> &verbs_context {
        // SAFETY: contexts have the marker of such a table, and it is alive as long as the context.
        unsafe {
            assert_eq!((*self.context).abi_compat.addr(), usize::MAX);
            &*self
                .context
                .byte_sub(offset_of!(verbs_context, context))
                .cast()
        }
    }

    pub(crate) fn create_cq(&self, entries: c_int) -> *mut ibv_cq {
        let cq = call!(ibv_create_cq(
            self.context => *mut ibv_context, entries => c_int,
            ptr::null_mut() => *mut c_void, ptr::null_mut() => *mut ibv_comp_channel, 0 => c_int,
        ) -> *mut ibv_cq);
        assert!(!cq.is_null(), "{}", errno());
        cq
    }

    pub(crate) fn create_cq_ex(&self, attr: &mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex {
        // SAFETY: the pointers are valid.
        unsafe { self.table().create_cq_ex.unwrap()(self.context, attr) }
    }

    pub(crate) fn create_qp_ex(&self, attr: &mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
        // SAFETY: the pointers are valid.
        unsafe { self.table().create_qp_ex.unwrap()(self.context, attr) }
    }

    /// Returns attributes of a queue pair with a single completion queue, for requests that are
    /// built using function calls.
    pub(crate) fn qp_attr(
        &self,
        cq: *mut ibv_cq,
        qp_type: ibv_qp_type,
        send_ops: u32,
    ) -> ibv_qp_init_attr_ex {
        // SAFETY: all zeroes is valid.
        let mut attr: ibv_qp_init_attr_ex = unsafe { zeroed() };
        attr.send_cq = cq;
        attr.recv_cq = cq;
        attr.qp_type = qp_type;
        attr.pd = self.pd;
        attr.cap = ibv_qp_cap {
            max_send_wr: 20,
            max_recv_wr: 40,
            max_send_sge: 3,
            max_recv_sge: 1,
            max_inline_data: 64,
        };
        attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        attr.send_ops_flags = send_ops.into();
        attr
    }

    pub(crate) fn gid(&self) -> ibv_gid {
        // SAFETY: all zeroes is valid.
        let mut gid: ibv_gid = unsafe { zeroed() };
        let result = call!(ibv_query_gid(self.context => *mut ibv_context, 1 => u8, 0 => c_int,
            &raw mut gid => *mut ibv_gid) -> c_int);
        assert_eq!(result, 0);
        gid
    }

    /// Registers memory with all access rights.
    pub(crate) fn register<T>(&self, memory: &mut [T]) -> *mut ibv_mr {
        let access = IBV_ACCESS_LOCAL_WRITE
            | IBV_ACCESS_REMOTE_WRITE
            | IBV_ACCESS_REMOTE_READ
            | IBV_ACCESS_REMOTE_ATOMIC;
        self.register_as(memory, access)
    }

    pub(crate) fn register_as<T>(&self, memory: &mut [T], access: c_uint) -> *mut ibv_mr {
        let mr = call!(ibv_reg_mr(
            self.pd => *mut ibv_pd, memory.as_mut_ptr().cast() => *mut c_void,
            size_of_val(memory) => usize, access as c_int => c_int,
        ) -> *mut ibv_mr);
        assert!(!mr.is_null(), "{}", errno());
        mr
    }
}

/// Modifies a queue pair.
pub(crate) fn modify(qp: *mut ibv_qp, attr: &ibv_qp_attr, mask: u32) {
    let result = call!(ibv_modify_qp(qp => *mut ibv_qp, attr => *const ibv_qp_attr,
        mask as c_int => c_int) -> c_int);
    assert_eq!(result, 0, "modify to {} by {mask:#x}", attr.qp_state);
}

/// Returns attributes for moving a queue pair of any type to RTS, connected to a queue pair number
/// at an address.
pub(crate) fn connected_attr(gid: ibv_gid, peer: u32) -> ibv_qp_attr {
    // SAFETY: all zeroes is valid.
    let mut attr: ibv_qp_attr = unsafe { zeroed() };
    attr.port_num = 1;
    attr.qkey = 0x1111_1111;
    attr.qp_access_flags =
        IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = peer;
    attr.ah_attr = ah_attr(gid);
    attr.max_dest_rd_atomic = 4;
    attr.max_rd_atomic = 4;
    attr.min_rnr_timer = 1;
    attr.timeout = 14;
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    attr
}

/// Moves a queue pair to RTS. If it is a connection, connects it to a queue pair number at an
/// address.
pub(crate) fn to_rts(qp: *mut ibv_qp, gid: ibv_gid, peer: u32) {
    // SAFETY: the queue pair is alive.
    let qp_type = unsafe { (*qp).qp_type };
    let mut attr = connected_attr(gid, peer);
    let first = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    attr.qp_state = IBV_QPS_INIT;
    if qp_type == IBV_QPT_UD {
        modify(qp, &attr, first | IBV_QP_QKEY);
        attr.qp_state = IBV_QPS_RTR;
        modify(qp, &attr, IBV_QP_STATE);
        attr.qp_state = IBV_QPS_RTS;
        return modify(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
    }
    modify(qp, &attr, first | IBV_QP_ACCESS_FLAGS);
    let path = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    let responder = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    attr.qp_state = IBV_QPS_RTR;
    // Each end of an XRC connection only has half of the attributes, and an unreliable connection
    // has none of them.
    let responder = if matches!(qp_type, IBV_QPT_XRC_SEND | IBV_QPT_UC) {
        0
    } else {
        responder
    };
    modify(qp, &attr, IBV_QP_STATE | path | responder);
    let retries = IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    let retries = match qp_type {
        IBV_QPT_XRC_RECV => IBV_QP_TIMEOUT,
        IBV_QPT_UC => 0,
        _ => IBV_QP_TIMEOUT | retries,
    };
    attr.qp_state = IBV_QPS_RTS;
    modify(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | retries);
}

/// Returns a path to an address.
pub(crate) fn ah_attr(gid: ibv_gid) -> ibv_ah_attr {
    // SAFETY: all zeroes is valid.
    let mut attr: ibv_ah_attr = unsafe { zeroed() };
    attr.grh.dgid = gid;
    attr.grh.hop_limit = 64;
    attr.is_global = 1;
    attr.port_num = 1;
    attr
}

/// Two queue pairs of the same device, connected to each other.
pub(crate) struct Pair {
    pub(crate) device: Device,
    pub(crate) cq: *mut ibv_cq,
    pub(crate) a: *mut ibv_qp,
    pub(crate) b: *mut ibv_qp,
}

impl Pair {
    pub(crate) fn new(device: Device, cq: *mut ibv_cq, send_ops: u32) -> Self {
        let make = || {
            let qp = device.create_qp_ex(&mut device.qp_attr(cq, IBV_QPT_RC, send_ops));
            assert!(!qp.is_null(), "{}", errno());
            qp
        };
        let (a, b) = (make(), make());
        // SAFETY: both are alive.
        let (number_a, number_b) = unsafe { ((*a).qp_num, (*b).qp_num) };
        to_rts(a, device.gid(), number_b);
        to_rts(b, device.gid(), number_a);
        Self { device, cq, a, b }
    }

    /// Returns the first queue pair, for building requests using function calls.
    pub(crate) fn builder(&self) -> *mut ibv_qp_ex {
        extended(self.a)
    }
}

pub(crate) fn extended(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    let qp = call!(ibv_qp_to_qp_ex(qp => *mut ibv_qp) -> *mut ibv_qp_ex);
    assert!(!qp.is_null(), "{}", errno());
    qp
}

/// Posts a receive request.
pub(crate) fn post_recv(qp: *mut ibv_qp, wr_id: u64, sge: Option<ibv_sge>) {
    let mut sge = sge;
    // SAFETY: all zeroes is valid.
    let mut wr: ibv_recv_wr = unsafe { zeroed() };
    wr.wr_id = wr_id;
    wr.num_sge = sge.is_some().into();
    wr.sg_list = sge.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
    let mut bad = ptr::null_mut();
    // SAFETY: the request is alive until the end of the call.
    let result = unsafe { riser_rdma_core_sys::ops::ibv_post_recv(qp, &raw mut wr, &raw mut bad) };
    assert_eq!(result, 0);
}

/// Polls until there are `count` completions.
pub(crate) fn completions(cq: *mut ibv_cq, count: usize) -> Vec<ibv_wc> {
    let start = Instant::now();
    let mut all = Vec::new();
    while all.len() < count {
        assert!(start.elapsed() < PATIENCE, "{} of {count}", all.len());
        all.extend(poll(cq));
    }
    assert!(all.len() == count, "{} of {count}", all.len());
    all
}

/// Polls available completions.
pub(crate) fn poll(cq: *mut ibv_cq) -> Vec<ibv_wc> {
    // SAFETY: all zeroes is valid, the queue is alive, and there is enough space.
    unsafe {
        let mut some: [ibv_wc; 8] = zeroed();
        let n = (*(*cq).context).ops.poll_cq.unwrap()(cq, 8, some.as_mut_ptr());
        assert!(n >= 0, "{n}");
        some[..n as usize].to_vec()
    }
}

/// Returns a piece of a region.
pub(crate) fn sge(mr: *mut ibv_mr, offset: usize, length: u32) -> ibv_sge {
    // SAFETY: the region is registered.
    unsafe {
        ibv_sge {
            addr: (*mr).addr.addr() as u64 + offset as u64,
            length,
            lkey: (*mr).lkey,
        }
    }
}

/// Returns the key and address for a peer.
pub(crate) fn remote(mr: *mut ibv_mr, offset: usize) -> (u32, u64) {
    // SAFETY: the region is registered.
    unsafe { ((*mr).rkey, (*mr).addr.addr() as u64 + offset as u64) }
}
