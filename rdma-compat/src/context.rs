//! Opened devices: their attributes, ports and asynchronous events.

use std::ffi::{c_char, c_int, c_void};
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::ptr;
use std::sync::Arc;
use std::time::Instant;

use riser_rdma_core_sys::bindings::*;
use riser_transport::roce::Roce;
use riser_transport::verbs::{AsyncEvent, PortState, QpState, Verbs as _};

use tracing::info;

use crate::command::Command;
use crate::devices::{Device, LinkLayer, lid, link_layer};
use crate::engine::{Engine, Locked, Reports};
use crate::errno::{Errno, minus, number};
use crate::object::{Kind, Ref, kind};
use crate::queue::{EventQueue, Unacknowledged};

/// Hardware version reported by the device. There is no hardware.
const HW_VERSION: u32 = 0;

/// Vendor ID reported by the device, which is an OUI. Like Linux's software devices, we use the
/// broadcast OUI, which does not belong to any organization. Programs treat 0 as an attribute that
/// was not set.
const VENDOR_ID: u32 = 0xff_ffff;

/// Vendor part ID reported by the device, to distinguish it from Linux's software devices, which
/// use 0.
const VENDOR_PART_ID: u32 = 1;

/// Frequency of the device's clock, which counts nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;

/// Maximum amount of device memory per process, in bytes.
pub(crate) const DEVICE_MEMORY: usize = 1 << 20;

/// Link layers of a port, and the flag of a port that requires a GRH.
const LINK_LAYER_INFINIBAND: u8 = 1;
const LINK_LAYER_ETHERNET: u8 = 2;
const GRH_REQUIRED: u8 = 1;

/// GID type of RoCEv2 in `ibv_gid_entry`, and in `ibv_query_gid_type`.
const GID_TYPE_ROCE_V2: u32 = 2;
const GID_SYSFS_ROCE_V2: u32 = 1;

/// Capabilities of on-demand paging: `ibv_odp_general_caps` and `ibv_odp_transport_cap_bits`.
const ODP_SUPPORT: u64 = 1;
const ODP_SUPPORT_IMPLICIT: u64 = 2;
const ODP_SEND: u32 = 1;
const ODP_RECV: u32 = 2;
const ODP_WRITE: u32 = 4;
/// Sends, receives (including shared receive queues), WRITEs, READs and atomics.
const ODP_ALL: u32 = 63;

/// An opened device.
pub(crate) struct Context {
    pub(crate) device: &'static Device,
    pub(crate) engine: Arc<Engine>,
    pub(crate) events: EventQueue<Event>,
    pub(crate) command: Command,
}

kind!(
    Context,
    verbs_context,
    ibv_context,
    offset_of!(verbs_context, context),
    b"cntx"
);

/// An asynchronous event that was not yet returned to the program.
#[derive(Clone, Copy)]
pub(crate) struct Event {
    pub(crate) kind: AsyncEvent,
    /// The affected object. `None` if it is an event of the port or device.
    pub(crate) object: Option<Subject>,
}

/// The affected object of an event: the program's pointer, and the counter of unacknowledged
/// events.
#[derive(Clone, Copy)]
pub(crate) struct Subject {
    pub(crate) handle: *mut c_void,
    pub(crate) unacknowledged: &'static Unacknowledged,
}

// SAFETY: the pointer is only returned to the program and never dereferenced.
unsafe impl Send for Subject {}

impl Context {
    /// Locks the device.
    pub(crate) fn lock(&self) -> Locked<'_> {
        self.engine.lock()
    }

    /// Returns a unique number among open contexts. It is the number of the descriptor.
    pub(crate) fn number(&self) -> u64 {
        self.events.raw_fd() as u64
    }

    /// Returns whether it belongs to a parent process.
    pub(crate) fn is_inherited(&self) -> bool {
        self.engine.is_inherited()
    }

    /// Returns whether its device was removed.
    pub(crate) fn is_removed(&self) -> bool {
        self.engine.is_removed()
    }

    /// Reports an event of an object.
    pub(crate) fn report_about(&self, kind: AsyncEvent, object: Subject) {
        let object = Some(object);
        self.events.push(Event { kind, object });
    }

    /// Drops the events of an object that is being destroyed, and waits until the program has
    /// acknowledged events that were already returned.
    pub(crate) fn retract_events(&self, object: &Unacknowledged) {
        let is_its = |event: &Event| {
            let subject = event.object.as_ref();
            subject.is_some_and(|s| ptr::eq(s.unacknowledged, object))
        };
        self.events.retract(is_its);
        object.wait();
    }
}

/// An object that has its own asynchronous events.
pub(crate) trait HasEvents: Kind {
    fn context(&self) -> Ref<Context>;

    /// Returns the counter of events that were returned to the program.
    fn async_events(&self) -> &Unacknowledged;
}

impl<K: HasEvents> Reports for Ref<K> {
    fn report(&self, event: AsyncEvent) {
        let subject = Subject {
            handle: self.handle().cast(),
            unacknowledged: self.kind().async_events(),
        };
        self.context().report_about(event, subject);
    }

    fn address(&self) -> usize {
        self.handle().addr()
    }

    fn is_of(&self, context: u64) -> bool {
        self.context().number() == context
    }
}

impl Reports for Ref<Context> {
    fn report(&self, kind: AsyncEvent) {
        let object = None;
        self.events.push(Event { kind, object });
    }

    fn address(&self) -> usize {
        self.handle().addr()
    }

    fn is_of(&self, context: u64) -> bool {
        self.number() == context
    }
}

/// Checks that two objects belong to the same context.
///
/// # Errors
/// Returns `EINVAL` if they do not.
pub(crate) fn check_same(ours: Ref<Context>, theirs: Ref<Context>) -> Result<(), Errno> {
    if ours == theirs {
        Ok(())
    } else {
        Err(Errno::INVALID)
    }
}

/// Returns the context for a program's pointer.
///
/// # Errors
/// Returns `EINVAL` if the pointer is invalid.
///
/// # Safety
/// Same as for [`Ref::get`].
pub(crate) unsafe fn context_of(context: *mut ibv_context) -> Result<Ref<Context>, Errno> {
    // SAFETY: guaranteed by the caller.
    unsafe { Ref::get(context) }
}

/// `ibv_close_device(3)`.
pub(crate) unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    minus(unsafe { context_of(context) }.and_then(|context| {
        let mut locked = context.lock();
        locked.contexts.remove(&context.number());
        if locked.contexts.is_empty() {
            log_counters(context.device, &locked.nic);
            log_leftovers(context.device, &locked.nic);
        }
        let has_objects = locked.end_queues(context.number());
        locked.transmit();
        drop(locked);
        context.events.close();
        context.command.close();
        match has_objects {
            // There are objects that still refer to the context.
            true => context.bury(),
            false => context.retire(),
        }
    }))
}

/// Logs the nonzero counters of a device when it is closed by the program.
fn log_counters(device: &Device, nic: &Roce) {
    let mut text = String::new();
    for (name, value) in nic.hw_counters().filter(|(_, value)| *value > 0) {
        // Writing to a string can't fail.
        let _ = write!(text, " {name}={value}");
    }
    if !text.is_empty() {
        info!("{} is closed:{text}", device.config.name);
    }
}

/// Logs the queue pairs that the program has not destroyed.
fn log_leftovers(device: &Device, nic: &Roce) {
    for qp in nic.qps() {
        let (Ok(number), Ok(attr), Ok(counters)) =
            (nic.qp_num(qp), nic.query_qp(qp), nic.qp_counters(qp))
        else {
            continue;
        };
        let state = attr.state.unwrap_or(QpState::Reset);
        let (sent, received) = (counters.rc.tx_packets, counters.rc.rx_packets);
        info!(
            "{}: queue pair {number:#x} was not destroyed: state {state:?}, {sent} packets sent, \
             {received} received",
            device.config.name
        );
    }
}

/// `ibv_query_device(3)`.
pub(crate) unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { context_of(context) }.map(|context| {
        // SAFETY: the program provides memory for the attributes.
        unsafe { attr.write(device_attr(&context)) };
    }))
}

fn device_attr(context: &Context) -> ibv_device_attr {
    let locked = context.lock();
    let ours = locked.nic.device_attr();
    let mut fw_ver = [0; 64];
    for (to, from) in fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *to = from as c_char;
    }
    let int = |n: u32| c_int::try_from(n).unwrap_or(c_int::MAX);
    ibv_device_attr {
        fw_ver,
        node_guid: ours.node_guid.to_be(),
        sys_image_guid: ours.node_guid.to_be(),
        max_mr_size: ours.max_mr_size,
        // Any power of two of at least one page, because addresses are virtual.
        page_size_cap: !0xfff,
        vendor_id: VENDOR_ID,
        vendor_part_id: VENDOR_PART_ID,
        hw_ver: HW_VERSION,
        max_qp: int(ours.max_qp),
        max_qp_wr: int(ours.max_qp_wr),
        device_cap_flags: IBV_DEVICE_CURR_QP_STATE_MOD
            | IBV_DEVICE_AUTO_PATH_MIG
            | IBV_DEVICE_RC_RNR_NAK_GEN
            | IBV_DEVICE_SRQ_RESIZE
            | IBV_DEVICE_SYS_IMAGE_GUID
            | IBV_DEVICE_XRC
            | IBV_DEVICE_MEM_MGT_EXTENSIONS
            | IBV_DEVICE_MEM_WINDOW
            | IBV_DEVICE_MEM_WINDOW_TYPE_2B,
        max_sge: int(ours.max_sge),
        max_sge_rd: int(ours.max_sge_rd),
        max_cq: int(ours.max_cq),
        max_cqe: int(ours.max_cqe),
        max_mr: int(ours.max_mr),
        max_mw: int(ours.max_mw),
        max_pd: int(ours.max_pd),
        max_qp_rd_atom: ours.max_qp_rd_atom.into(),
        max_res_rd_atom: int(u32::from(ours.max_qp_rd_atom).saturating_mul(ours.max_qp)),
        max_qp_init_rd_atom: ours.max_qp_init_rd_atom.into(),
        // Atomics are atomic with respect to other atomics of the device, but not of the processor.
        atomic_cap: IBV_ATOMIC_HCA,
        max_ah: int(ours.max_ah),
        max_srq: int(ours.max_srq),
        max_srq_wr: int(ours.max_srq_wr),
        max_srq_sge: int(ours.max_sge),
        max_mcast_grp: int(ours.max_mcast_grp),
        max_mcast_qp_attach: int(ours.max_mcast_qp_attach),
        max_total_mcast_qp_attach: int(ours.max_mcast_grp.saturating_mul(ours.max_mcast_qp_attach)),
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        phys_port_cnt: ours.ports,
        ..Default::default()
    }
}

/// `ibv_query_device_ex(3)`.
pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { context_of(context) }.and_then(|context| {
        // SAFETY: an input is a structure with a mask, none of whose bits are supported.
        if !input.is_null() && unsafe { (*input).comp_mask } != 0 {
            return Err(Errno::INVALID);
        }
        if size < size_of::<ibv_device_attr>() {
            return Err(Errno::INVALID);
        }
        let pacing = {
            let locked = context.lock();
            let ours = locked.nic.device_attr();
            (ours.min_rate_kbps, ours.max_rate_kbps)
        };
        let attr_ex = ibv_device_attr_ex {
            orig_attr: device_attr(&context),
            completion_timestamp_mask: u64::MAX,
            hca_core_clock: CLOCK_KHZ,
            cq_mod_caps: ibv_cq_moderation_caps {
                max_cq_count: u16::MAX,
                max_cq_period: u16::MAX,
            },
            packet_pacing_caps: ibv_packet_pacing_caps {
                qp_rate_limit_min: pacing.0,
                qp_rate_limit_max: pacing.1,
                supported_qpts: 1 << IBV_QPT_RC
                    | 1 << IBV_QPT_UC
                    | 1 << IBV_QPT_UD
                    | 1 << IBV_QPT_XRC_SEND,
            },
            max_dm_size: DEVICE_MEMORY as u64,
            xrc_odp_caps: ODP_ALL,
            device_cap_flags_ex: device_attr(&context).device_cap_flags.into(),
            phys_port_cnt_ex: 1,
            odp_caps: ibv_odp_caps {
                // This includes regions that cover the whole address space.
                general_caps: ODP_SUPPORT | ODP_SUPPORT_IMPLICIT,
                per_transport_caps: ibv_odp_caps__bindgen_ty_1 {
                    rc_odp_caps: ODP_ALL,
                    uc_odp_caps: ODP_SEND | ODP_RECV | ODP_WRITE,
                    ud_odp_caps: ODP_SEND | ODP_RECV,
                },
            },
            ..Default::default()
        };
        // A program built for a different version uses a different size, and gets the fields that
        // it knows.
        // SAFETY: the program's structure has `size` bytes.
        unsafe {
            ptr::write_bytes(attr.cast::<u8>(), 0, size);
            let known = size.min(size_of::<ibv_device_attr_ex>());
            ptr::copy_nonoverlapping((&raw const attr_ex).cast::<u8>(), attr.cast(), known);
        }
        Ok(())
    }))
}

/// `ibv_query_rt_values_ex(3)`.
pub(crate) unsafe extern "C" fn query_rt_values(
    context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { context_of(context) }.map(|context| {
        let time = context.lock().nic.device_time(Instant::now());
        // SAFETY: the program provides memory for the values.
        unsafe {
            (*values).comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
            // This uses the unit of the device's clock, like completions. We don't use seconds, so
            // that programs don't need to add them.
            (*values).raw_clock.tv_sec = 0;
            (*values).raw_clock.tv_nsec = time as _;
        }
    }))
}

fn port_attr(context: &Context, port: u8) -> Result<ibv_port_attr, Errno> {
    let ours = context.lock().nic.query_port(port)?;
    let is_active = ours.state == PortState::Active;
    Ok(ibv_port_attr {
        state: if is_active {
            IBV_PORT_ACTIVE
        } else {
            IBV_PORT_DOWN
        },
        max_mtu: ours.max_mtu.code().into(),
        active_mtu: ours.active_mtu.code().into(),
        gid_tbl_len: ours.gid_table_len.into(),
        port_cap_flags: ours.capabilities.bits(),
        max_msg_sz: ours.max_msg_size,
        pkey_tbl_len: ours.pkey_table_len,
        lid: lid(),
        sm_lid: lid(),
        max_vl_num: 1,
        // One lane of 2.5 Gbit/s, which is the minimum value: a socket has no speed.
        active_width: 1,
        active_speed: 1,
        // Link up, or polling.
        phys_state: if is_active { 5 } else { 2 },
        link_layer: match link_layer() {
            LinkLayer::Ethernet => LINK_LAYER_ETHERNET,
            LinkLayer::InfiniBand => LINK_LAYER_INFINIBAND,
        },
        flags: GRH_REQUIRED,
        ..Default::default()
    })
}

/// `ibv_query_port(3)` for programs built for a different size of the structure.
pub(crate) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { context_of(context) }.and_then(|context| {
        let ours = port_attr(&context, port)?;
        // SAFETY: the program's structure has `size` bytes.
        unsafe {
            ptr::write_bytes(attr.cast::<u8>(), 0, size);
            let known = size.min(size_of::<ibv_port_attr>());
            ptr::copy_nonoverlapping((&raw const ours).cast::<u8>(), attr.cast(), known);
        }
        Ok(())
    }))
}

/// `ibv_query_port(3)` for programs that do not use the operation table. Their structure ends
/// before `port_cap_flags2`.
pub(crate) unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: guaranteed by the program.
    unsafe {
        query_port(
            context,
            port,
            attr,
            offset_of!(ibv_port_attr, port_cap_flags2),
        )
    }
}

/// `ibv_query_gid(3)`.
pub(crate) unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    minus(unsafe { context_of(context) }.and_then(|context| {
        let index = u16::try_from(index).map_err(|_| Errno::INVALID)?;
        let ours = context.lock().nic.query_gid(port, index)?;
        // SAFETY: the program provides memory for the GID.
        unsafe { gid.write(ibv_gid { raw: ours.0 }) };
        Ok(())
    }))
}

fn gid_entry(context: &Context, port: u32, index: u32) -> Result<ibv_gid_entry, Errno> {
    let port_number = u8::try_from(port).map_err(|_| Errno::INVALID)?;
    let entry = u16::try_from(index).map_err(|_| Errno::INVALID)?;
    let gid = context.lock().nic.query_gid(port_number, entry)?;
    Ok(ibv_gid_entry {
        gid: ibv_gid { raw: gid.0 },
        gid_index: index,
        port_num: port,
        gid_type: GID_TYPE_ROCE_V2,
        // The socket is bound to an address, whose interface may change.
        ndev_ifindex: 0,
    })
}

/// `ibv_query_gid_ex(3)`: returns an entry of the GID table.
pub(crate) unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    size: usize,
) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { context_of(context) }.and_then(|context| {
        if flags != 0 || size < size_of::<ibv_gid_entry>() {
            return Err(Errno::INVALID);
        }
        let ours = gid_entry(&context, port, index)?;
        // SAFETY: the program provides memory for an entry.
        unsafe { entry.write(ours) };
        Ok(())
    }))
}

/// `ibv_query_gid_table(3)`: returns the entries of all ports.
pub(crate) unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max: usize,
    flags: u32,
    size: usize,
) -> isize {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    let result = unsafe { context_of(context) }.and_then(|context| {
        if flags != 0 || size < size_of::<ibv_gid_entry>() || max == 0 {
            return Err(Errno::INVALID);
        }
        let count = usize::from(context.lock().nic.query_port(1)?.gid_table_len);
        if max < count {
            return Err(Errno::INVALID);
        }
        for index in 0..count {
            let ours = gid_entry(&context, 1, index as u32)?;
            // SAFETY: the program provides memory for `max` entries.
            unsafe { entries.add(index).write(ours) };
        }
        Ok(count as isize)
    });
    result.unwrap_or_else(|errno| -(errno.0 as isize))
}

/// Returns the type of an entry of the GID table. Used by rdma-core's own tools.
pub(crate) unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    port: u8,
    index: u32,
    kind: *mut u32,
) -> c_int {
    // SAFETY: the program passes a valid pointer.
    minus(unsafe { context_of(context) }.and_then(|context| {
        gid_entry(&context, port.into(), index)?;
        // SAFETY: the program provides memory for the type.
        unsafe { kind.write(GID_SYSFS_ROCE_V2) };
        Ok(())
    }))
}

/// `ibv_query_pkey(3)`: returns the key in network byte order.
pub(crate) unsafe extern "C" fn ibv_query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut __be16,
) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    minus(unsafe { context_of(context) }.and_then(|context| {
        let index = u16::try_from(index).map_err(|_| Errno::INVALID)?;
        let ours = context.lock().nic.query_pkey(port, index)?;
        // SAFETY: the program provides memory for the key.
        unsafe { pkey.write(ours.0.to_be()) };
        Ok(())
    }))
}

/// `ibv_get_pkey_index(3)`.
pub(crate) unsafe extern "C" fn ibv_get_pkey_index(
    context: *mut ibv_context,
    port: u8,
    pkey: __be16,
) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    let found = unsafe { context_of(context) }.and_then(|context| {
        let ours = context.lock().nic.query_pkey(port, 0)?;
        // The membership bit is not part of the partition.
        let partition = |key: u16| key & 0x7fff;
        let is_it = partition(ours.0) == partition(u16::from_be(pkey));
        is_it.then_some(0).ok_or(Errno::INVALID)
    });
    found.unwrap_or_else(|errno| {
        errno.set();
        -1
    })
}
