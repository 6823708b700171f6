//! Sequences of verbs.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::zeroed;
use std::ptr;
use std::sync::Barrier;

use libc::{EAGAIN, EBUSY, EFAULT, EINVAL, EMSGSIZE, ENOMEM, EOPNOTSUPP};
use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::ops;

use super::library::*;
use super::{Choices, Pool, check};

/// Number of calls per thread.
const CALLS: usize = 400;

/// Size of the memory used for regions, in bytes.
const MEMORY: usize = 1 << 16;

const ACCESS: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_MW_BIND
    | IBV_ACCESS_ZERO_BASED
    | IBV_ACCESS_ON_DEMAND;

/// All access rights of peers.
const ALL: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC;

/// All bits of the attribute mask of a queue pair.
const MASK: u32 = (1 << 26) - 1;

const TYPES: [ibv_qp_type; 7] = [
    IBV_QPT_RC,
    IBV_QPT_RC,
    IBV_QPT_UC,
    IBV_QPT_UD,
    IBV_QPT_XRC_SEND,
    IBV_QPT_XRC_RECV,
    IBV_QPT_RAW_PACKET,
];

const STATES: [ibv_qp_state; 8] = [
    IBV_QPS_RESET,
    IBV_QPS_INIT,
    IBV_QPS_RTR,
    IBV_QPS_RTS,
    IBV_QPS_SQD,
    IBV_QPS_SQE,
    IBV_QPS_ERR,
    99,
];

const OPCODES: [ibv_wr_opcode; 11] = [
    IBV_WR_SEND,
    IBV_WR_SEND,
    IBV_WR_SEND_WITH_IMM,
    IBV_WR_SEND_WITH_INV,
    IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM,
    IBV_WR_RDMA_READ,
    IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD,
    IBV_WR_LOCAL_INV,
    77,
];

/// Objects of a thread. Pointers of both devices are mixed, and pointers of the wrong device must
/// be rejected.
struct Program {
    choices: Choices,
    devices: [Device; 2],
    memory: Box<[u8; MEMORY]>,
    pds: Pool<ibv_pd>,
    mrs: Pool<ibv_mr>,
    mws: Pool<ibv_mw>,
    cqs: Pool<ibv_cq>,
    channels: Pool<ibv_comp_channel>,
    qps: Pool<ibv_qp>,
    srqs: Pool<ibv_srq>,
    ahs: Pool<ibv_ah>,
    xrcds: Pool<ibv_xrcd>,
    dms: Pool<ibv_dm>,
}

/// Runs a sequence. Every other seed uses two threads with separate objects on the same devices.
pub(super) fn run(seed: u64) {
    let threads = 1 + seed % 2;
    let start = Barrier::new(threads as usize);
    std::thread::scope(|scope| {
        for n in 0..threads {
            let start = &start;
            scope.spawn(move || {
                let mut program = Program::new(2 * seed + n, threads == 1);
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
    fn new(seed: u64, uses_gone: bool) -> Self {
        let devices = [Device::open("riser0"), Device::open("riser1")];
        let mut pds = Pool::new(uses_gone);
        pds.add(devices[0].pd);
        pds.add(devices[1].pd);
        Self {
            choices: Choices::new(seed),
            devices,
            memory: Box::new([7; MEMORY]),
            pds,
            mrs: Pool::new(uses_gone),
            mws: Pool::new(uses_gone),
            cqs: Pool::new(uses_gone),
            channels: Pool::new(uses_gone),
            qps: Pool::new(uses_gone),
            srqs: Pool::new(uses_gone),
            ahs: Pool::new(uses_gone),
            xrcds: Pool::new(uses_gone),
            dms: Pool::new(uses_gone),
        }
    }

    fn context(&mut self) -> *mut ibv_context {
        self.devices[self.choices.below(2)].context
    }

    /// Returns the function table of one of the devices.
    fn table(&mut self) -> &'static verbs_context {
        let n = self.choices.below(2);
        let table: *const verbs_context = self.devices[n].table();
        // SAFETY: the devices are closed after the last call.
        unsafe { &*table }
    }

    fn step(&mut self) {
        match self.choices.below(40) {
            0 => self.alloc_pd(),
            1 => self.dealloc_pd(),
            2 | 3 => self.reg_mr(),
            4 => self.dereg_mr(),
            5 => self.rereg_mr(),
            6 => self.create_channel(),
            7 => self.destroy_channel(),
            8 | 9 => self.create_cq(),
            10 => self.destroy_cq(),
            11 => self.resize_cq(),
            12 | 13 => self.create_qp(),
            14 => self.destroy_qp(),
            15 => self.create_srq(),
            16 => self.destroy_srq(),
            17 => self.modify_srq(),
            18 => self.modify_qp(),
            19 => self.query(),
            20 | 21 => self.connect(),
            22..=25 => self.post_send(),
            26..=28 => self.post_recv(),
            29 => self.post_srq_recv(),
            30..=32 => self.poll(),
            33 => self.notify(),
            34 => self.ah(),
            35 => self.mw(),
            36 => self.mcast(),
            37 => self.xrcd(),
            38 => self.dm(),
            _ => self.events(),
        }
    }

    fn alloc_pd(&mut self) {
        let context = self.context();
        self.choices.show("ibv_alloc_pd");
        let pd = call!(ibv_alloc_pd(context => *mut ibv_context) -> *mut ibv_pd);
        made("ibv_alloc_pd", pd, &[EINVAL, ENOMEM]);
        self.pds.add(pd);
    }

    fn dealloc_pd(&mut self) {
        // Keep at least two domains.
        if self.pds.live.len() <= 2 {
            return;
        }
        let pd = self.pds.any(&mut self.choices);
        if self.devices.iter().any(|device| device.pd == pd) {
            return;
        }
        self.choices.show("ibv_dealloc_pd");
        let result = call!(ibv_dealloc_pd(pd => *mut ibv_pd) -> c_int);
        check("ibv_dealloc_pd", result, &[EINVAL, EBUSY]);
        if result == 0 {
            self.pds.remove(pd);
        }
    }

    /// Returns a piece of the memory, or a piece that does not exist.
    fn piece(&mut self) -> (*mut c_void, usize) {
        let at = self.memory.as_mut_ptr();
        let offset = self.choices.below(MEMORY);
        if self.choices.once_in(10) {
            let length = self.choices.of(&[0, usize::MAX, 1 << 40, 1 << 63]);
            return (at.cast(), length);
        }
        let length = self.choices.below(MEMORY - offset);
        // SAFETY: the end is within the memory.
        (unsafe { at.add(offset) }.cast(), length)
    }

    fn reg_mr(&mut self) {
        let pd = self.pds.any(&mut self.choices);
        let (at, length) = self.piece();
        let access = match self.choices.once_in(2) {
            true => self.choices.flags(ACCESS),
            false => ALL,
        };
        self.choices.show("ibv_reg_mr");
        let mr = if self.choices.once_in(3) {
            let iova = self.choices.rng.u64(..);
            call!(ibv_reg_mr_iova2(pd => *mut ibv_pd, at => *mut c_void, length => usize,
                iova => u64, access => c_uint) -> *mut ibv_mr)
        } else {
            call!(ibv_reg_mr(pd => *mut ibv_pd, at => *mut c_void, length => usize,
                access as c_int => c_int) -> *mut ibv_mr)
        };
        made("ibv_reg_mr", mr, &[EINVAL, ENOMEM, EFAULT, EOPNOTSUPP]);
        self.mrs.add(mr);
    }

    fn dereg_mr(&mut self) {
        let mr = self.mrs.any(&mut self.choices);
        self.choices.show("ibv_dereg_mr");
        let result = call!(ibv_dereg_mr(mr => *mut ibv_mr) -> c_int);
        check("ibv_dereg_mr", result, &[EINVAL, EBUSY]);
        if result == 0 {
            self.mrs.remove(mr);
        }
    }

    fn rereg_mr(&mut self) {
        let mr = self.mrs.any(&mut self.choices);
        let pd = self.pds.any(&mut self.choices);
        let (at, length) = self.piece();
        let flags = self.choices.flags(7) as c_int;
        let access = self.choices.flags(ACCESS) as c_int;
        self.choices.show("ibv_rereg_mr");
        let result = call!(ibv_rereg_mr(mr => *mut ibv_mr, flags => c_int, pd => *mut ibv_pd,
            at => *mut c_void, length => usize, access => c_int) -> c_int);
        // IBV_REREG_MR_ERR_INPUT and other errors are all negative.
        assert!((-6..=0).contains(&result), "ibv_rereg_mr: {result}");
    }

    fn create_channel(&mut self) {
        let context = self.context();
        self.choices.show("ibv_create_comp_channel");
        let channel = call!(ibv_create_comp_channel(context => *mut ibv_context)
            -> *mut ibv_comp_channel);
        made("ibv_create_comp_channel", channel, &[EINVAL, ENOMEM]);
        if !channel.is_null() {
            // SAFETY: the channel is alive. No call may wait.
            unsafe { libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK) };
        }
        self.channels.add(channel);
    }

    fn destroy_channel(&mut self) {
        let channel = self.channels.any(&mut self.choices);
        self.choices.show("ibv_destroy_comp_channel");
        let result = call!(ibv_destroy_comp_channel(channel => *mut ibv_comp_channel) -> c_int);
        check("ibv_destroy_comp_channel", result, &[EINVAL, EBUSY]);
        if result == 0 {
            self.channels.remove(channel);
        }
    }

    fn create_cq(&mut self) {
        let context = self.context();
        let channel = self.channels.any(&mut self.choices);
        let entries = self.choices.count() as c_int;
        let vector = self.choices.of(&[0, 0, 0, 1, -1, 99]);
        self.choices.show("ibv_create_cq");
        let cq = call!(ibv_create_cq(context => *mut ibv_context, entries => c_int,
            ptr::null_mut() => *mut c_void, channel => *mut ibv_comp_channel,
            vector => c_int) -> *mut ibv_cq);
        made("ibv_create_cq", cq, &[EINVAL, ENOMEM]);
        self.cqs.add(cq);
    }

    fn destroy_cq(&mut self) {
        let cq = self.cqs.any(&mut self.choices);
        self.choices.show("ibv_destroy_cq");
        let result = call!(ibv_destroy_cq(cq => *mut ibv_cq) -> c_int);
        check("ibv_destroy_cq", result, &[EINVAL, EBUSY]);
        if result == 0 {
            self.cqs.remove(cq);
        }
    }

    fn resize_cq(&mut self) {
        let cq = self.cqs.any(&mut self.choices);
        let entries = self.choices.count() as c_int;
        self.choices.show("ibv_resize_cq");
        let result = call!(ibv_resize_cq(cq => *mut ibv_cq, entries => c_int) -> c_int);
        check("ibv_resize_cq", result, &[EINVAL, ENOMEM, EOPNOTSUPP]);
    }

    fn create_qp(&mut self) {
        // SAFETY: all zeroes is valid.
        let mut attr: ibv_qp_init_attr_ex = unsafe { zeroed() };
        let is_usual = !self.choices.once_in(3);
        attr.qp_type = self.choices.of(&TYPES);
        let pd = self.pds.any(&mut self.choices);
        attr.pd = pd;
        attr.send_cq = self.cqs.any(&mut self.choices);
        attr.recv_cq = self.cqs.any(&mut self.choices);
        let mut context = self.context();
        if !self.choices.once_in(4) && self.pds.live.contains(&pd) {
            // Usually all objects belong to the same device.
            // SAFETY: the objects are alive.
            unsafe {
                context = (*pd).context;
                let own = self.cqs.live.iter().filter(|cq| (***cq).context == context);
                let own: Vec<_> = own.copied().collect();
                if !own.is_empty() {
                    attr.send_cq = self.choices.of(&own);
                    attr.recv_cq = self.choices.of(&own);
                }
            }
        }
        attr.comp_mask = IBV_QP_INIT_ATTR_PD;
        attr.cap = ibv_qp_cap {
            max_send_wr: 8,
            max_recv_wr: 8,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 32,
        };
        if !is_usual {
            attr.cap.max_send_wr = self.choices.count();
            attr.cap.max_recv_sge = self.choices.count();
            attr.cap.max_inline_data = self.choices.count();
            attr.comp_mask = self.choices.flags(0x3f);
            attr.send_ops_flags = self.choices.flags(0x7ff).into();
            attr.create_flags = self.choices.flags(0xf);
            attr.sq_sig_all = 1;
        }
        if self.choices.once_in(4) {
            attr.srq = self.srqs.any(&mut self.choices);
        }
        if attr.qp_type == IBV_QPT_XRC_RECV {
            attr.xrcd = self.xrcds.any(&mut self.choices);
            attr.comp_mask |= IBV_QP_INIT_ATTR_XRCD;
        }
        self.choices.show("create_qp_ex");
        let create = self.table().create_qp_ex.unwrap();
        // SAFETY: the attributes are alive. The pointers in them may be invalid, as allowed by the
        // library.
        let qp = unsafe { create(context, &raw mut attr) };
        made("create_qp_ex", qp, &[EINVAL, ENOMEM, EOPNOTSUPP]);
        self.qps.add(qp);
    }

    fn destroy_qp(&mut self) {
        let qp = self.qps.any(&mut self.choices);
        self.take_async_events();
        self.choices.show("ibv_destroy_qp");
        let result = call!(ibv_destroy_qp(qp => *mut ibv_qp) -> c_int);
        check("ibv_destroy_qp", result, &[EINVAL, EBUSY]);
        if result == 0 {
            self.qps.remove(qp);
        }
    }

    fn create_srq(&mut self) {
        let pd = self.pds.any(&mut self.choices);
        // SAFETY: all zeroes is valid.
        let mut attr: ibv_srq_init_attr = unsafe { zeroed() };
        attr.attr.max_wr = self.choices.count();
        attr.attr.max_sge = self.choices.of(&[1, 1, 2, 1 << 20]);
        attr.attr.srq_limit = self.choices.count();
        self.choices.show("ibv_create_srq");
        let srq = call!(ibv_create_srq(pd => *mut ibv_pd, &raw mut attr => *mut ibv_srq_init_attr)
            -> *mut ibv_srq);
        made("ibv_create_srq", srq, &[EINVAL, ENOMEM, EOPNOTSUPP]);
        self.srqs.add(srq);
    }

    fn destroy_srq(&mut self) {
        let srq = self.srqs.any(&mut self.choices);
        self.take_async_events();
        self.choices.show("ibv_destroy_srq");
        let result = call!(ibv_destroy_srq(srq => *mut ibv_srq) -> c_int);
        check("ibv_destroy_srq", result, &[EINVAL, EBUSY]);
        if result == 0 {
            self.srqs.remove(srq);
        }
    }

    fn modify_srq(&mut self) {
        let srq = self.srqs.any(&mut self.choices);
        let mut attr = ibv_srq_attr {
            max_wr: self.choices.count(),
            max_sge: 1,
            srq_limit: self.choices.count(),
        };
        let mask = self.choices.flags(3) as c_int;
        self.choices.show("ibv_modify_srq");
        let result = call!(ibv_modify_srq(srq => *mut ibv_srq, &raw mut attr => *mut ibv_srq_attr,
            mask => c_int) -> c_int);
        check("ibv_modify_srq", result, &[EINVAL, ENOMEM, EOPNOTSUPP]);
    }

    fn modify_qp(&mut self) {
        let qp = self.qps.any(&mut self.choices);
        // SAFETY: all zeroes is valid.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        attr.qp_state = self.choices.of(&STATES);
        attr.cur_qp_state = self.choices.of(&STATES);
        attr.path_mtu = self.choices.of(&[IBV_MTU_1024, 0, 77]);
        attr.path_mig_state = self.choices.of(&[0, 1, 2, 9]);
        attr.qkey = self.choices.rng.u32(..);
        attr.rq_psn = self.choices.rng.u32(..);
        attr.sq_psn = self.choices.rng.u32(..);
        attr.dest_qp_num = self.choices.rng.u32(..);
        attr.qp_access_flags = self.choices.flags(ACCESS);
        attr.cap.max_send_wr = self.choices.count();
        attr.port_num = self.choices.of(&[1, 1, 0, 2, 255]);
        attr.pkey_index = self.choices.of(&[0, 0, 1, u16::MAX]);
        attr.max_rd_atomic = self.choices.of(&[1, 16, 255]);
        attr.max_dest_rd_atomic = self.choices.of(&[1, 16, 255]);
        attr.timeout = self.choices.of(&[10, 31, 255]);
        attr.retry_cnt = self.choices.of(&[0, 7, 255]);
        attr.rnr_retry = self.choices.of(&[0, 7, 255]);
        attr.min_rnr_timer = self.choices.of(&[1, 31, 255]);
        attr.ah_attr = self.ah_attr();
        attr.alt_ah_attr = self.ah_attr();
        attr.alt_port_num = 1;
        let mask = match self.choices.below(3) {
            0 => self.choices.flags(MASK),
            // Either only a state, or a state with attributes that it supports.
            1 => IBV_QP_STATE,
            _ => IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        };
        self.choices.show("ibv_modify_qp");
        let result = call!(ibv_modify_qp(qp => *mut ibv_qp, &raw mut attr => *mut ibv_qp_attr,
            mask as c_int => c_int) -> c_int);
        check(
            "ibv_modify_qp",
            result,
            &[EINVAL, ENOMEM, EOPNOTSUPP, libc::ETIMEDOUT],
        );
    }

    fn ah_attr(&mut self) -> ibv_ah_attr {
        let gid = self.devices[self.choices.below(2)].gid();
        let mut attr = ah_attr(gid);
        if self.choices.once_in(5) {
            attr.grh.sgid_index = self.choices.of(&[0, 1, 255]);
            attr.port_num = self.choices.of(&[0, 1, 2]);
            attr.is_global = self.choices.of(&[0, 1]);
            attr.grh.dgid.raw = self.choices.of(&[[0; 16], [0xff; 16], gid_bytes(gid)]);
            attr.static_rate = self.choices.of(&[0, 99]);
        }
        attr
    }

    fn query(&mut self) {
        // SAFETY: all zeroes is valid for these structures.
        unsafe {
            match self.choices.below(4) {
                0 => {
                    let qp = self.qps.any(&mut self.choices);
                    let (mut attr, mut init): (ibv_qp_attr, ibv_qp_init_attr) =
                        (zeroed(), zeroed());
                    let mask = self.choices.flags(MASK) as c_int;
                    self.choices.show("ibv_query_qp");
                    let result = call!(ibv_query_qp(qp => *mut ibv_qp,
                        &raw mut attr => *mut ibv_qp_attr, mask => c_int,
                        &raw mut init => *mut ibv_qp_init_attr) -> c_int);
                    check("ibv_query_qp", result, &[EINVAL]);
                }
                1 => {
                    let srq = self.srqs.any(&mut self.choices);
                    let mut attr: ibv_srq_attr = zeroed();
                    let result = call!(ibv_query_srq(srq => *mut ibv_srq,
                        &raw mut attr => *mut ibv_srq_attr) -> c_int);
                    check("ibv_query_srq", result, &[EINVAL]);
                }
                2 => {
                    let context = self.context();
                    let port = self.choices.of(&[0, 1, 2, 255]);
                    let mut gid: ibv_gid = zeroed();
                    let index = self.choices.count() as c_int;
                    let result = call!(ibv_query_gid(context => *mut ibv_context, port => u8,
                        index => c_int, &raw mut gid => *mut ibv_gid) -> c_int);
                    assert!(matches!(result, 0 | -1), "{result}");
                    let mut key = 0_u16;
                    let result = call!(ibv_query_pkey(context => *mut ibv_context, port => u8,
                        index => c_int, &raw mut key => *mut u16) -> c_int);
                    assert!(matches!(result, 0 | -1), "{result}");
                }
                _ => {
                    let context = self.context();
                    let mut attr: ibv_device_attr = zeroed();
                    let result = call!(ibv_query_device(context => *mut ibv_context,
                        &raw mut attr => *mut ibv_device_attr) -> c_int);
                    check("ibv_query_device", result, &[]);
                }
            }
        }
    }

    /// Connects two queue pairs to each other, if possible.
    fn connect(&mut self) {
        let all = [
            self.qps.live(&mut self.choices),
            self.qps.live(&mut self.choices),
        ];
        let [Some(a), Some(b)] = all else { return };
        for qp in [a, b] {
            // SAFETY: all zeroes is valid.
            let mut attr: ibv_qp_attr = unsafe { zeroed() };
            attr.qp_state = IBV_QPS_RESET;
            let result = call!(ibv_modify_qp(qp => *mut ibv_qp, &raw mut attr => *mut ibv_qp_attr,
                IBV_QP_STATE as c_int => c_int) -> c_int);
            check("ibv_modify_qp", result, &[]);
        }
        for (own, peer) in [(a, b), (b, a)] {
            // SAFETY: both queue pairs and their contexts are alive.
            let (number, gid, kind) = unsafe {
                let at = self.devices.iter().find(|d| d.context == (*peer).context);
                ((*peer).qp_num, at.unwrap().gid(), (*own).qp_type)
            };
            self.choices.show(&format!("connect {own:?} to {peer:?}"));
            try_to_rts(own, kind, gid, number);
        }
    }

    /// Returns a piece of a region, which usually belongs to the queue's protection domain.
    fn sge(&mut self, pd: *mut ibv_pd) -> ibv_sge {
        // SAFETY: the regions are alive.
        let own = self
            .mrs
            .live
            .iter()
            .filter(|mr| unsafe { (***mr).pd } == pd);
        let own: Vec<_> = own.copied().collect();
        let any = self.mrs.live(&mut self.choices);
        let mr = match own.is_empty() || self.choices.once_in(6) {
            true => any,
            false => Some(self.choices.of(&own)),
        };
        let Some(mr) = mr else {
            return ibv_sge {
                addr: self.choices.rng.u64(..),
                length: self.choices.count(),
                lkey: self.choices.rng.u32(..),
            };
        };
        // SAFETY: the region is alive.
        let (addr, length, lkey) = unsafe { ((*mr).addr.addr(), (*mr).length, (*mr).lkey) };
        let mut sge = ibv_sge {
            addr: addr as u64,
            length: self.choices.below(length.clamp(1, 5000)) as u32,
            lkey,
        };
        match self.choices.below(12) {
            0 => sge.length = self.choices.count(),
            1 => sge.lkey = self.choices.rng.u32(..),
            2 => sge.addr = self.choices.rng.u64(..),
            _ => {}
        }
        sge
    }

    fn post_send(&mut self) {
        let Some(qp) = self.qps.reachable(&mut self.choices) else {
            return;
        };
        // SAFETY: the structure of the queue pair stays readable.
        let pd = unsafe { (*qp).pd };
        let mut pieces = [self.sge(pd), self.sge(pd), self.sge(pd)];
        // SAFETY: all zeroes is valid.
        let mut wr: ibv_send_wr = unsafe { zeroed() };
        wr.wr_id = self.choices.rng.u64(..);
        wr.sg_list = pieces.as_mut_ptr();
        wr.num_sge = self.choices.of(&[0, 1, 1, 2, 3]);
        if self.choices.once_in(20) {
            (wr.sg_list, wr.num_sge) = (ptr::null_mut(), self.choices.of(&[0, 1, -1]));
        }
        wr.opcode = self.choices.of(&OPCODES);
        wr.send_flags = self.choices.flags(0x1f);
        if wr.send_flags & IBV_SEND_INLINE != 0 {
            // Inline data is read immediately, so the memory must be valid.
            let at = self.memory.as_ptr().addr() as u64;
            for piece in &mut pieces {
                piece.addr = at;
                piece.length = piece.length.min(MEMORY as u32);
            }
        }
        let target = self.sge(pd);
        let rkey = match self.mrs.live(&mut self.choices) {
            // SAFETY: the region is alive.
            Some(mr) => unsafe { (*mr).rkey },
            None => target.lkey,
        };
        let ah = self.ahs.any(&mut self.choices);
        // SAFETY: the structure of the queue pair stays readable, and the members of the union are
        // plain data.
        let result = unsafe {
            if (*qp).qp_type == IBV_QPT_UD {
                wr.wr.ud.ah = ah;
                wr.wr.ud.remote_qpn = self.peer();
                wr.wr.ud.remote_qkey = 0x1111_1111;
            } else {
                wr.wr.atomic.remote_addr = target.addr & !7;
                wr.wr.atomic.rkey = rkey;
            }
            self.choices
                .show(&format!("ibv_post_send {} to {qp:?}", wr.opcode));
            let mut bad = ptr::null_mut();
            let result = ops::ibv_post_send(qp, &raw mut wr, &raw mut bad);
            assert!(
                result == 0 || bad == &raw mut wr,
                "the request that is refused"
            );
            result
        };
        check(
            "ibv_post_send",
            result,
            &[EINVAL, ENOMEM, EOPNOTSUPP, EMSGSIZE, EFAULT],
        );
    }

    fn peer(&mut self) -> u32 {
        match self.qps.live(&mut self.choices) {
            // SAFETY: the queue pair is alive.
            Some(qp) => unsafe { (*qp).qp_num },
            None => self.choices.rng.u32(..),
        }
    }

    fn post_recv(&mut self) {
        let Some(qp) = self.qps.reachable(&mut self.choices) else {
            return;
        };
        // SAFETY: the structure of the queue pair stays readable.
        let (mut pieces, mut wr) = self.receive(unsafe { (*qp).pd });
        wr.sg_list = pieces.as_mut_ptr();
        self.choices.show("ibv_post_recv");
        let mut bad = ptr::null_mut();
        // SAFETY: the structure of the queue pair stays readable, and the request is alive.
        let result = unsafe { ops::ibv_post_recv(qp, &raw mut wr, &raw mut bad) };
        check("ibv_post_recv", result, &[EINVAL, ENOMEM, EOPNOTSUPP]);
    }

    fn receive(&mut self, pd: *mut ibv_pd) -> ([ibv_sge; 2], ibv_recv_wr) {
        let pieces = [self.sge(pd), self.sge(pd)];
        // SAFETY: all zeroes is valid.
        let mut wr: ibv_recv_wr = unsafe { zeroed() };
        wr.wr_id = self.choices.rng.u64(..);
        wr.num_sge = self.choices.of(&[0, 1, 1, 2]);
        (pieces, wr)
    }

    fn post_srq_recv(&mut self) {
        let Some(srq) = self.srqs.reachable(&mut self.choices) else {
            return;
        };
        // SAFETY: the structure of the queue stays readable.
        let (mut pieces, mut wr) = self.receive(unsafe { (*srq).pd });
        wr.sg_list = pieces.as_mut_ptr();
        self.choices.show("ibv_post_srq_recv");
        let mut bad = ptr::null_mut();
        // SAFETY: the structure of the queue stays readable, and the request is alive.
        let result = unsafe { ops::ibv_post_srq_recv(srq, &raw mut wr, &raw mut bad) };
        check("ibv_post_srq_recv", result, &[EINVAL, ENOMEM, EOPNOTSUPP]);
    }

    fn poll(&mut self) {
        let Some(cq) = self.cqs.reachable(&mut self.choices) else {
            return;
        };
        self.choices.show("ibv_poll_cq");
        // SAFETY: the structure of the queue stays readable, and there is enough space.
        unsafe {
            let mut some: [ibv_wc; 8] = zeroed();
            let room = self.choices.of(&[8, 1, 0]);
            let n = ops::ibv_poll_cq(cq, room, some.as_mut_ptr());
            assert!((-libc::EOVERFLOW..=room).contains(&n), "{n}");
        }
    }

    fn notify(&mut self) {
        let Some(cq) = self.cqs.reachable(&mut self.choices) else {
            return;
        };
        let solicited = self.choices.once_in(2);
        self.choices.show("ibv_req_notify_cq");
        // SAFETY: the structure of the queue stays readable.
        let result = unsafe { ops::ibv_req_notify_cq(cq, solicited) };
        check("ibv_req_notify_cq", result, &[EINVAL]);
    }

    fn ah(&mut self) {
        if self.choices.once_in(3) {
            let ah = self.ahs.any(&mut self.choices);
            self.choices.show("ibv_destroy_ah");
            let result = call!(ibv_destroy_ah(ah => *mut ibv_ah) -> c_int);
            check("ibv_destroy_ah", result, &[EINVAL]);
            if result == 0 {
                self.ahs.remove(ah);
            }
            return;
        }
        let pd = self.pds.any(&mut self.choices);
        let mut attr = self.ah_attr();
        self.choices.show("ibv_create_ah");
        let ah = call!(ibv_create_ah(pd => *mut ibv_pd, &raw mut attr => *mut ibv_ah_attr)
            -> *mut ibv_ah);
        made(
            "ibv_create_ah",
            ah,
            &[EINVAL, ENOMEM, EOPNOTSUPP, libc::ENETUNREACH],
        );
        self.ahs.add(ah);
    }

    fn mw(&mut self) {
        // SAFETY: the structures of objects stay readable, and all zeroes are valid requests.
        unsafe {
            match self.choices.below(3) {
                0 => {
                    let Some(pd) = self.pds.reachable(&mut self.choices) else {
                        return;
                    };
                    let kind = self.choices.of(&[1, 2, 9]);
                    self.choices.show("ibv_alloc_mw");
                    let mw = ops::ibv_alloc_mw(pd, kind);
                    made("ibv_alloc_mw", mw, &[EINVAL, ENOMEM, EOPNOTSUPP]);
                    self.mws.add(mw);
                }
                1 => {
                    let Some(mw) = self.mws.reachable(&mut self.choices) else {
                        return;
                    };
                    self.choices.show("ibv_dealloc_mw");
                    let result = ops::ibv_dealloc_mw(mw);
                    check("ibv_dealloc_mw", result, &[EINVAL, EBUSY]);
                    if result == 0 {
                        self.mws.remove(mw);
                    }
                }
                _ => {
                    let qp = self.qps.any(&mut self.choices);
                    let Some(mw) = self.mws.reachable(&mut self.choices) else {
                        return;
                    };
                    let mut bind: ibv_mw_bind = zeroed();
                    bind.bind_info.mr = self.mrs.any(&mut self.choices);
                    let piece = self.sge(ptr::null_mut());
                    bind.bind_info.addr = piece.addr;
                    bind.bind_info.length = piece.length.into();
                    bind.bind_info.mw_access_flags = self.choices.flags(ACCESS);
                    bind.send_flags = self.choices.flags(0x1f);
                    self.choices.show("ibv_bind_mw");
                    let bind_mw = (*(*mw).context).ops.bind_mw.unwrap();
                    let result = bind_mw(qp, mw, &raw mut bind);
                    check("ibv_bind_mw", result, &[EINVAL, ENOMEM, EOPNOTSUPP]);
                }
            }
        }
    }

    fn mcast(&mut self) {
        let qp = self.qps.any(&mut self.choices);
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 239, 255, 43, 1]);
        if self.choices.once_in(4) {
            gid = self.choices.of(&[[0; 16], [0xff; 16]]);
        }
        let gid = ibv_gid { raw: gid };
        let lid = self.choices.of(&[0, 0xc000]);
        self.choices.show("ibv_attach_mcast, ibv_detach_mcast");
        let attached = call!(ibv_attach_mcast(qp => *mut ibv_qp, &raw const gid => *const ibv_gid,
            lid => u16) -> c_int);
        check(
            "ibv_attach_mcast",
            attached,
            &[EINVAL, ENOMEM, EOPNOTSUPP, libc::ENODEV],
        );
        let detached = call!(ibv_detach_mcast(qp => *mut ibv_qp, &raw const gid => *const ibv_gid,
            lid => u16) -> c_int);
        check("ibv_detach_mcast", detached, &[EINVAL]);
        assert!(attached != 0 || detached == 0);
    }

    fn xrcd(&mut self) {
        let (context, table) = (self.context(), self.table());
        // SAFETY: the attributes are alive.
        unsafe {
            if self.choices.once_in(3) {
                let xrcd = self.xrcds.any(&mut self.choices);
                self.choices.show("ibv_close_xrcd");
                let result = table.close_xrcd.unwrap()(xrcd);
                check("ibv_close_xrcd", result, &[EINVAL, EBUSY]);
                if result == 0 {
                    self.xrcds.remove(xrcd);
                }
                return;
            }
            let mut attr = ibv_xrcd_init_attr {
                comp_mask: self.choices.of(&[3, 3, 1, 0, 0xff]),
                fd: self.choices.of(&[-1, -1, 9999]),
                oflags: self.choices.of(&[libc::O_CREAT, libc::O_EXCL, 0]),
            };
            self.choices.show("ibv_open_xrcd");
            let xrcd = table.open_xrcd.unwrap()(context, &raw mut attr);
            let allowed = [
                EINVAL,
                ENOMEM,
                EOPNOTSUPP,
                libc::EBADF,
                libc::ENOENT,
                libc::EEXIST,
            ];
            made("ibv_open_xrcd", xrcd, &allowed);
            self.xrcds.add(xrcd);
        }
    }

    fn dm(&mut self) {
        let (context, table) = (self.context(), self.table());
        // SAFETY: the attributes are alive, and the structures of objects stay readable.
        unsafe {
            match self.choices.below(3) {
                0 => {
                    let mut attr: ibv_alloc_dm_attr = zeroed();
                    attr.length = self.choices.of(&[64, 4096, 0, usize::MAX, 1 << 40]);
                    self.choices.show("ibv_alloc_dm");
                    let dm = table.alloc_dm.unwrap()(context, &raw mut attr);
                    made("ibv_alloc_dm", dm, &[EINVAL, ENOMEM, EOPNOTSUPP]);
                    self.dms.add(dm);
                }
                1 => {
                    let dm = self.dms.any(&mut self.choices);
                    self.choices.show("ibv_free_dm");
                    let result = table.free_dm.unwrap()(dm);
                    check("ibv_free_dm", result, &[EINVAL, EBUSY]);
                    if result == 0 {
                        self.dms.remove(dm);
                    }
                }
                _ => {
                    let (pd, dm) = (
                        self.pds.any(&mut self.choices),
                        self.dms.any(&mut self.choices),
                    );
                    let offset = self.choices.of(&[0, 8, 1 << 30]);
                    let length = self.choices.of(&[8, 64, usize::MAX]);
                    let access = self.choices.flags(ACCESS);
                    self.choices.show("ibv_reg_dm_mr");
                    let mr = table.reg_dm_mr.unwrap()(pd, dm, offset, length, access);
                    made("ibv_reg_dm_mr", mr, &[EINVAL, ENOMEM, EOPNOTSUPP]);
                    self.mrs.add(mr);
                }
            }
        }
    }

    /// Receives events of completion queues, and acknowledges them immediately, because destroying
    /// a queue waits for this.
    fn events(&mut self) {
        self.take_async_events();
        let Some(channel) = self.channels.live(&mut self.choices) else {
            return;
        };
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        self.choices.show("ibv_get_cq_event");
        let result = call!(ibv_get_cq_event(channel => *mut ibv_comp_channel,
            &raw mut cq => *mut *mut ibv_cq, &raw mut context => *mut *mut c_void) -> c_int);
        if result == 0 {
            assert!(
                self.cqs.live.contains(&cq),
                "the event of a queue that is gone"
            );
            call!(ibv_ack_cq_events(cq => *mut ibv_cq, 1 => c_uint));
        } else {
            check("ibv_get_cq_event", errno(), &[EAGAIN]);
        }
    }

    fn take_async_events(&mut self) {
        for device in &self.devices {
            // SAFETY: the context is alive, and all zeroes is valid.
            unsafe {
                libc::fcntl((*device.context).async_fd, libc::F_SETFL, libc::O_NONBLOCK);
                let mut event: ibv_async_event = zeroed();
                self.choices.show("ibv_get_async_event");
                while call!(ibv_get_async_event(device.context => *mut ibv_context,
                    &raw mut event => *mut ibv_async_event) -> c_int)
                    == 0
                {
                    call!(ibv_ack_async_event(&raw mut event => *mut ibv_async_event));
                }
            }
        }
    }

    /// Destroys all objects, with users before the objects that they use. All calls must succeed.
    fn end(&mut self) {
        self.choices.show("end");
        self.take_async_events();
        let destroyed = |what: &str, result: c_int| assert_eq!(result, 0, "{what}: in use or gone");
        for qp in self.qps.live.drain(..) {
            destroyed("qp", call!(ibv_destroy_qp(qp => *mut ibv_qp) -> c_int));
        }
        for srq in self.srqs.live.drain(..) {
            destroyed("srq", call!(ibv_destroy_srq(srq => *mut ibv_srq) -> c_int));
        }
        // SAFETY: the objects are alive, and so are their contexts.
        unsafe {
            for mw in self.mws.live.drain(..) {
                destroyed("mw", ops::ibv_dealloc_mw(mw));
            }
            for mr in self.mrs.live.drain(..) {
                destroyed("mr", call!(ibv_dereg_mr(mr => *mut ibv_mr) -> c_int));
            }
            let table = self.devices[0].table();
            for dm in self.dms.live.drain(..) {
                destroyed("dm", table.free_dm.unwrap()(dm));
            }
            for xrcd in self.xrcds.live.drain(..) {
                destroyed("xrcd", table.close_xrcd.unwrap()(xrcd));
            }
        }
        for ah in self.ahs.live.drain(..) {
            destroyed("ah", call!(ibv_destroy_ah(ah => *mut ibv_ah) -> c_int));
        }
        for cq in self.cqs.live.drain(..) {
            destroyed("cq", call!(ibv_destroy_cq(cq => *mut ibv_cq) -> c_int));
        }
        for channel in self.channels.live.drain(..) {
            let result = call!(ibv_destroy_comp_channel(channel => *mut ibv_comp_channel) -> c_int);
            destroyed("channel", result);
        }
        for pd in self.pds.live.drain(..) {
            destroyed("pd", call!(ibv_dealloc_pd(pd => *mut ibv_pd) -> c_int));
        }
        for device in &self.devices {
            let result = call!(ibv_close_device(device.context => *mut ibv_context) -> c_int);
            destroyed("context", result);
        }
    }
}

fn gid_bytes(gid: ibv_gid) -> [u8; 16] {
    // SAFETY: both members are the same plain bytes.
    unsafe { gid.raw }
}

/// Checks that a pointer refers to an object, or that the error is allowed.
#[track_caller]
fn made<T>(call: &str, object: *mut T, allowed: &[c_int]) {
    if object.is_null() {
        let errno = errno();
        assert_ne!(errno, 0, "{call}: no reason");
        check(call, errno, allowed);
    }
}

/// Like [`to_rts`], for a queue pair that can be in any state.
fn try_to_rts(qp: *mut ibv_qp, kind: ibv_qp_type, gid: ibv_gid, peer: u32) {
    let mut attr = connected_attr(gid, peer);
    // If the peer was destroyed, time out soon.
    attr.timeout = 10;
    attr.retry_cnt = 1;
    attr.rnr_retry = 1;
    let first = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    let path = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    let responder = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    let retries = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    let last = IBV_QP_STATE | IBV_QP_SQ_PSN;
    let masks = match kind {
        IBV_QPT_UD => [first | IBV_QP_QKEY, IBV_QP_STATE, last],
        IBV_QPT_UC => [first | IBV_QP_ACCESS_FLAGS, path, last],
        IBV_QPT_XRC_SEND => [first | IBV_QP_ACCESS_FLAGS, path, last | retries],
        IBV_QPT_XRC_RECV => [
            first | IBV_QP_ACCESS_FLAGS,
            path | responder,
            last | IBV_QP_TIMEOUT,
        ],
        _ => [
            first | IBV_QP_ACCESS_FLAGS,
            path | responder,
            last | retries,
        ],
    };
    let states = [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS];
    for (state, mask) in states.into_iter().zip(masks) {
        attr.qp_state = state;
        let result = call!(ibv_modify_qp(qp => *mut ibv_qp, &raw mut attr => *mut ibv_qp_attr,
            mask as c_int => c_int) -> c_int);
        check("ibv_modify_qp", result, &[EINVAL]);
    }
}
