//! Structures of the kernel interface, and conversions for programs that use this interface
//! directly.

#![allow(dead_code, reason = "the layout is the kernel's")]

use riser_rdma_core_sys::bindings::*;

/// `struct ib_uverbs_global_route` of `rdma/ib_user_verbs.h`.
#[repr(C)]
pub(crate) struct KernelRoute {
    dgid: [u8; 16],
    flow_label: u32,
    sgid_index: u8,
    hop_limit: u8,
    traffic_class: u8,
    reserved: u8,
}

/// `struct ib_uverbs_ah_attr`.
#[repr(C)]
pub(crate) struct KernelAhAttr {
    grh: KernelRoute,
    dlid: u16,
    sl: u8,
    src_path_bits: u8,
    static_rate: u8,
    is_global: u8,
    port_num: u8,
    reserved: u8,
}

/// `struct ib_uverbs_qp_attr`.
#[repr(C)]
pub(crate) struct KernelQpAttr {
    qp_attr_mask: u32,
    qp_state: u32,
    cur_qp_state: u32,
    path_mtu: u32,
    path_mig_state: u32,
    qkey: u32,
    rq_psn: u32,
    sq_psn: u32,
    dest_qp_num: u32,
    qp_access_flags: u32,
    ah_attr: KernelAhAttr,
    alt_ah_attr: KernelAhAttr,
    max_send_wr: u32,
    max_recv_wr: u32,
    max_send_sge: u32,
    max_recv_sge: u32,
    max_inline_data: u32,
    pkey_index: u16,
    alt_pkey_index: u16,
    en_sqd_async_notify: u8,
    sq_draining: u8,
    max_rd_atomic: u8,
    max_dest_rd_atomic: u8,
    min_rnr_timer: u8,
    port_num: u8,
    timeout: u8,
    retry_cnt: u8,
    rnr_retry: u8,
    alt_port_num: u8,
    alt_timeout: u8,
    reserved: [u8; 5],
}

/// `struct ib_user_path_rec` of `rdma/ib_user_sa.h`.
#[repr(C)]
pub(crate) struct KernelPathRec {
    dgid: [u8; 16],
    sgid: [u8; 16],
    dlid: __be16,
    slid: __be16,
    raw_traffic: u32,
    flow_label: __be32,
    reversible: u32,
    mtu: u32,
    pkey: __be16,
    hop_limit: u8,
    traffic_class: u8,
    numb_path: u8,
    sl: u8,
    mtu_selector: u8,
    rate_selector: u8,
    rate: u8,
    packet_life_time_selector: u8,
    packet_life_time: u8,
    preference: u8,
}

// Sizes as in the kernel headers.
const _: () = {
    assert!(size_of::<KernelAhAttr>() == 32);
    assert!(size_of::<KernelQpAttr>() == 144);
    assert!(size_of::<KernelPathRec>() == 64);
};

fn ah_attr(from: &KernelAhAttr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: from.grh.dgid },
            flow_label: from.grh.flow_label,
            sgid_index: from.grh.sgid_index,
            hop_limit: from.grh.hop_limit,
            traffic_class: from.grh.traffic_class,
        },
        dlid: from.dlid,
        sl: from.sl,
        src_path_bits: from.src_path_bits,
        static_rate: from.static_rate,
        is_global: from.is_global,
        port_num: from.port_num,
    }
}

/// Converts an address vector from the kernel.
pub(crate) unsafe extern "C" fn ibv_copy_ah_attr_from_kern(
    to: *mut ibv_ah_attr,
    from: *const KernelAhAttr,
) {
    // SAFETY: the program provides both structures.
    unsafe { to.write(ah_attr(&*from)) };
}

/// Converts queue pair attributes from the kernel. Attributes that the kernel does not provide are
/// not changed.
pub(crate) unsafe extern "C" fn ibv_copy_qp_attr_from_kern(
    to: *mut ibv_qp_attr,
    from: *const KernelQpAttr,
) {
    // SAFETY: the program provides both structures.
    let (to, from) = unsafe { (&mut *to, &*from) };
    *to = ibv_qp_attr {
        qp_state: from.qp_state,
        cur_qp_state: from.cur_qp_state,
        path_mtu: from.path_mtu,
        path_mig_state: from.path_mig_state,
        qkey: from.qkey,
        rq_psn: from.rq_psn,
        sq_psn: from.sq_psn,
        dest_qp_num: from.dest_qp_num,
        qp_access_flags: from.qp_access_flags,
        cap: ibv_qp_cap {
            max_send_wr: from.max_send_wr,
            max_recv_wr: from.max_recv_wr,
            max_send_sge: from.max_send_sge,
            max_recv_sge: from.max_recv_sge,
            max_inline_data: from.max_inline_data,
        },
        ah_attr: ah_attr(&from.ah_attr),
        alt_ah_attr: ah_attr(&from.alt_ah_attr),
        pkey_index: from.pkey_index,
        alt_pkey_index: from.alt_pkey_index,
        en_sqd_async_notify: from.en_sqd_async_notify,
        sq_draining: from.sq_draining,
        max_rd_atomic: from.max_rd_atomic,
        max_dest_rd_atomic: from.max_dest_rd_atomic,
        min_rnr_timer: from.min_rnr_timer,
        port_num: from.port_num,
        timeout: from.timeout,
        retry_cnt: from.retry_cnt,
        rnr_retry: from.rnr_retry,
        alt_port_num: from.alt_port_num,
        alt_timeout: from.alt_timeout,
        rate_limit: to.rate_limit,
    };
}

/// Converts a path record from the kernel.
pub(crate) unsafe extern "C" fn ibv_copy_path_rec_from_kern(
    to: *mut ibv_sa_path_rec,
    from: *const KernelPathRec,
) {
    // SAFETY: the program provides both structures.
    unsafe {
        let from = &*from;
        to.write(ibv_sa_path_rec {
            dgid: ibv_gid { raw: from.dgid },
            sgid: ibv_gid { raw: from.sgid },
            dlid: from.dlid,
            slid: from.slid,
            raw_traffic: from.raw_traffic as _,
            flow_label: from.flow_label,
            hop_limit: from.hop_limit,
            traffic_class: from.traffic_class,
            reversible: from.reversible as _,
            numb_path: from.numb_path,
            pkey: from.pkey,
            sl: from.sl,
            mtu_selector: from.mtu_selector,
            // This is a code of 6 bits.
            mtu: from.mtu as u8,
            rate_selector: from.rate_selector,
            rate: from.rate,
            packet_life_time_selector: from.packet_life_time_selector,
            packet_life_time: from.packet_life_time,
            preference: from.preference,
        });
    }
}

/// Converts a path record for the kernel.
pub(crate) unsafe extern "C" fn ibv_copy_path_rec_to_kern(
    to: *mut KernelPathRec,
    from: *const ibv_sa_path_rec,
) {
    // SAFETY: the program provides both structures, and a GID is 16 bytes.
    unsafe {
        let from = &*from;
        to.write(KernelPathRec {
            dgid: from.dgid.raw,
            sgid: from.sgid.raw,
            dlid: from.dlid,
            slid: from.slid,
            raw_traffic: from.raw_traffic as u32,
            flow_label: from.flow_label,
            reversible: from.reversible as u32,
            mtu: from.mtu.into(),
            pkey: from.pkey,
            hop_limit: from.hop_limit,
            traffic_class: from.traffic_class,
            numb_path: from.numb_path,
            sl: from.sl,
            mtu_selector: from.mtu_selector,
            rate_selector: from.rate_selector,
            rate: from.rate,
            packet_life_time_selector: from.packet_life_time_selector,
            packet_life_time: from.packet_life_time,
            preference: from.preference,
        });
    }
}
