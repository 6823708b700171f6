//! Completion queues and completion channels.

use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::{wc_opcode_code, wc_status_code};
use riser_transport::verbs::{
    Completion, CqId, CqInitAttr, Moderation, NetworkHeader, Notify, Verbs as _, WcStatus,
};
use rustix::fs::OFlags;

use crate::cancel::{read_count, step};
use crate::context::{Context, HasEvents, context_of};
use crate::engine::{Engine, Fires};
use crate::errno::{Errno, minus, number, pointer};
use crate::object::{Ref, kind};
use crate::queue::{EventQueue, Unacknowledged};
use crate::turn::Turn;

/// Service levels of datagrams with a RoCEv2 network header: a bit for UDP, and the type of header.
const IPV4_OVER_UDP: u8 = 0b1010;
const IPV6_OVER_UDP: u8 = 0b1001;

/// A completion channel: a queue of notifications with a descriptor.
pub(crate) struct Channel {
    context: Ref<Context>,
    events: EventQueue<Ref<Cq>>,
    /// Number of completion queues that use it.
    users: AtomicU32,
}

kind!(Channel, ibv_comp_channel, b"chan");

/// A completion queue.
pub(crate) struct Cq {
    pub(crate) context: Ref<Context>,
    pub(crate) id: CqId,
    channel: Option<Ref<Channel>>,
    /// Set if the program is waiting for a notification.
    is_armed: AtomicBool,
    events: Unacknowledged,
    pub(crate) async_events: Unacknowledged,
    /// Held during a batch of extended polling.
    pub(crate) polling: Turn,
    /// Set if completions have timestamps.
    pub(crate) is_timed: bool,
}

/// A completion queue as seen by the program, and the current completion of extended polling.
#[repr(C)]
pub(crate) struct Shown {
    pub(crate) ex: ibv_cq_ex,
    pub(crate) current: ibv_wc,
    /// Nanoseconds of the device's clock.
    pub(crate) device_time: u64,
    /// Nanoseconds since 1970.
    pub(crate) wall_time: u64,
}

kind!(Cq, Shown, ibv_cq, 0, b"cque");

/// Attributes of a completion queue.
pub(crate) struct CqParams {
    pub(crate) entries: u32,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) vector: u32,
    pub(crate) is_timed: bool,
}

impl HasEvents for Cq {
    fn context(&self) -> Ref<Context> {
        self.context
    }

    fn async_events(&self) -> &Unacknowledged {
        &self.async_events
    }
}

impl Fires for Ref<Cq> {
    fn fire(&self) -> bool {
        let was_armed = self.is_armed.swap(false, Ordering::Relaxed);
        if let Some(channel) = self.channel {
            channel.events.push(*self);
        }
        was_armed
    }
}

impl Channel {
    /// Returns whether a thread that gets a notification blocks.
    fn is_blocking(&self) -> Result<bool, Errno> {
        // SAFETY: the program owns the channel, so its descriptor is open.
        let fd = unsafe { BorrowedFd::borrow_raw(self.events.raw_fd()) };
        Ok(!rustix::fs::fcntl_getfl(fd)?.contains(OFlags::NONBLOCK))
    }
}

/// Returns whether the program has a signal handler that interrupts blocking calls.
fn has_interrupting_handler() -> bool {
    (1..=libc::SIGRTMAX()).any(|signal| {
        // SAFETY: all zeroes is valid.
        let mut action: libc::sigaction = unsafe { zeroed() };
        // SAFETY: the action is only read. The call fails for signals that are reserved for the C
        // library.
        let result = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        let is_handled = ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction);
        result == 0 && is_handled && action.sa_flags & libc::SA_RESTART == 0
    })
}

/// `ibv_create_comp_channel(3)`.
pub(crate) unsafe extern "C" fn ibv_create_comp_channel(
    context: *mut ibv_context,
) -> *mut ibv_comp_channel {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|context| {
        let events = EventQueue::new()?;
        let c = ibv_comp_channel {
            context: context.handle(),
            fd: events.raw_fd(),
            refcnt: 0,
        };
        let users = AtomicU32::new(0);
        let channel = Channel {
            context,
            events,
            users,
        };
        Ok(Ref::new(c, channel).handle())
    }))
}

/// `ibv_destroy_comp_channel(3)`.
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Channel>::get(channel) }.and_then(|channel| {
        if channel.users.load(Ordering::Acquire) > 0 {
            return Err(Errno(libc::EBUSY));
        }
        channel.retire()
    }))
}

/// `ibv_create_cq(3)`.
pub(crate) unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|context| {
        let params = CqParams {
            entries: u32::try_from(entries).map_err(|_| Errno::INVALID)?,
            cq_context,
            channel,
            vector: u32::try_from(vector).map_err(|_| Errno::INVALID)?,
            is_timed: false,
        };
        // SAFETY: as above.
        unsafe { create(context, &params) }.map(Ref::handle)
    }))
}

/// Creates a completion queue.
///
/// # Safety
/// The channel must be null or a pointer returned by this library.
pub(crate) unsafe fn create(context: Ref<Context>, params: &CqParams) -> Result<Ref<Cq>, Errno> {
    let channel = (!params.channel.is_null())
        // SAFETY: guaranteed by the caller.
        .then(|| unsafe { Ref::<Channel>::get(params.channel) })
        .transpose()?;
    let mut locked = context.lock();
    let id = locked.nic.create_cq_with(&CqInitAttr {
        entries: params.entries,
        vector: Some(params.vector),
        is_timed: params.is_timed,
    })?;
    // SAFETY: all zeroes is valid: no functions, an unlocked mutex, plain integers.
    let mut c: Shown = unsafe { zeroed() };
    c.ex.context = context.handle();
    c.ex.channel = params.channel;
    c.ex.cq_context = params.cq_context;
    c.ex.handle = id.0.index() as u32;
    c.ex.cqe = c_int::try_from(params.entries).unwrap_or(c_int::MAX);
    if let Some(channel) = channel {
        channel.users.fetch_add(1, Ordering::AcqRel);
    }
    let cq = Ref::new(
        c,
        Cq {
            context,
            id,
            channel,
            is_armed: AtomicBool::new(false),
            events: Unacknowledged::default(),
            async_events: Unacknowledged::default(),
            polling: Turn::default(),
            is_timed: params.is_timed,
        },
    );
    locked.cqs.insert(id, Box::new(cq));
    Ok(cq)
}

/// `ibv_resize_cq(3)`.
pub(crate) unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, entries: c_int) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Cq>::get(cq) }.and_then(|cq| {
        let count = u32::try_from(entries).map_err(|_| Errno::INVALID)?;
        cq.context.lock().nic.resize_cq(cq.id, count)?;
        // SAFETY: the queue is alive.
        unsafe { (*cq.handle()).cqe = entries };
        Ok(())
    }))
}

/// `ibv_modify_cq(3)`.
pub(crate) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { Ref::<Cq>::get(cq) }.and_then(|cq| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::INVALID)?;
        if attr.attr_mask != IBV_CQ_ATTR_MODERATE {
            return Err(Errno::INVALID);
        }
        let moderation = Moderation {
            count: attr.moderate.cq_count,
            period: Duration::from_micros(attr.moderate.cq_period.into()),
        };
        Ok(cq.context.lock().nic.modify_cq(cq.id, moderation)?)
    }))
}

/// `ibv_destroy_cq(3)`.
pub(crate) unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Cq>::get(cq) }.and_then(|cq| {
        {
            let mut locked = cq.context.lock();
            locked.nic.destroy_cq(cq.id)?;
            locked.cqs.remove(&cq.id);
            if cq.is_armed.swap(false, Ordering::Relaxed) {
                locked.disarm();
            }
        }
        // Drop events that were not yet returned to the program, and wait until it has acknowledged
        // the rest.
        if let Some(channel) = cq.channel {
            channel.events.retract(|c| *c == cq);
        }
        cq.events.wait();
        cq.context.retract_events(&cq.async_events);
        if let Some(channel) = cq.channel {
            channel.users.fetch_sub(1, Ordering::AcqRel);
        }
        cq.retire()
    }))
}

/// `ibv_req_notify_cq(3)`.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Cq>::get(cq) }.and_then(|cq| {
        let notify = if solicited_only == 0 {
            Notify::Next
        } else {
            Notify::Solicited
        };
        let mut locked = cq.context.lock();
        locked.nic.req_notify_cq(cq.id, notify)?;
        let is_first = !cq.is_armed.swap(true, Ordering::Relaxed);
        locked.arm(is_first);
        Ok(())
    }))
}

/// `ibv_get_cq_event(3)`.
pub(crate) unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    let (fd, engine) = match step(|| unsafe { wait_of(channel) }) {
        Ok(wait) => wait,
        Err(errno) => return step(|| minus(Err(errno))),
    };
    if let Some(engine) = engine
        // SAFETY: the program owns the channel, and no frame has anything to drop.
        && unsafe { engine.drive_until(fd) }
        // `read(2)` would be restarted after a handler that was installed with `SA_RESTART`.
        && step(has_interrupting_handler)
    {
        return step(|| minus(Err(Errno(libc::EINTR))));
    }
    loop {
        // SAFETY: as above.
        let error = unsafe { read_count(fd) };
        // SAFETY: the program passes valid pointers, as required by the manual page.
        if let Some(result) = step(|| unsafe { take_event(channel, error, cq, cq_context) }) {
            return result;
        }
    }
}

/// Returns the descriptor of a channel, and the engine to drive if the thread waits for a
/// notification.
///
/// # Safety
/// The program must pass a valid pointer, as required by the manual page.
unsafe fn wait_of(
    channel: *mut ibv_comp_channel,
) -> Result<(c_int, Option<&'static Engine>), Errno> {
    // SAFETY: guaranteed by the caller.
    let channel = unsafe { Ref::<Channel>::get(channel) }?.kind();
    let engine = channel
        .is_blocking()?
        .then(|| &*channel.context.kind().engine);
    Ok((channel.events.raw_fd(), engine))
}

/// Returns the next notification to the program. Returns `None` if it must wait again.
///
/// # Safety
/// The program must pass valid pointers, as required by the manual page.
unsafe fn take_event(
    channel: *mut ibv_comp_channel,
    error: c_int,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> Option<c_int> {
    if error != 0 {
        return Some(minus(Err(Errno(error))));
    }
    // SAFETY: guaranteed by the caller.
    let channel = match unsafe { Ref::<Channel>::get(channel) } {
        Ok(channel) => channel,
        Err(errno) => return Some(minus(Err(errno))),
    };
    let next = channel.events.pop(|cq| cq.events.add())?;
    // SAFETY: the program provides memory for both, and the queue can't be destroyed before the
    // event is acknowledged.
    unsafe {
        cq.write(next.handle());
        cq_context.write((*next.handle()).cq_context);
    }
    Some(0)
}

/// `ibv_ack_cq_events(3)`.
pub(crate) unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: u32) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    if let Ok(cq) = unsafe { Ref::<Cq>::get(cq) } {
        cq.events.acknowledge(count);
    }
}

/// `ibv_poll_cq(3)`: returns the number of completions, or a negative number on error.
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, max: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    let Ok(cq) = (unsafe { Ref::<Cq>::get(cq) }) else {
        return -libc::EINVAL;
    };
    let Ok(max) = usize::try_from(max) else {
        return -libc::EINVAL;
    };
    let mut locked = cq.context.lock();
    match locked.poll_cq(cq.id, max) {
        Ok(completions) => {
            for (i, completion) in completions.iter().enumerate() {
                // SAFETY: the program provides memory for `max` completions.
                unsafe { wc.add(i).write(convert(completion)) };
            }
            completions.len() as c_int
        }
        Err(error) => -Errno::from(error).0,
    }
}

/// Converts a completion for the program.
pub(crate) fn convert(ours: &Completion) -> ibv_wc {
    // SAFETY: all zeroes is valid for this plain C structure.
    let mut wc: ibv_wc = unsafe { zeroed() };
    wc.wr_id = ours.wr_id.0;
    wc.status = wc_status_code(ours.status);
    wc.qp_num = ours.qp_num;
    wc.vendor_err = ours.vendor_err;
    wc.opcode = wc_opcode_code(ours.opcode);
    if ours.status == WcStatus::Success {
        wc.byte_len = ours.byte_len;
        wc.src_qp = ours.src_qp;
        if let Some(imm) = ours.imm {
            wc.__bindgen_anon_1.imm_data = imm.to_be();
            wc.wc_flags |= IBV_WC_WITH_IMM;
        }
        if let Some(key) = ours.invalidated {
            wc.__bindgen_anon_1.invalidated_rkey = key.0;
            wc.wc_flags |= IBV_WC_WITH_INV;
        }
        // Only datagrams have a source queue pair, and on RoCE they always have a GRH.
        if ours.src_qp != 0 {
            wc.wc_flags |= IBV_WC_GRH;
        }
        // The completion indicates the type of header (IBTA annex A17, 4.5.1). We use the same
        // field as adapters of the ConnectX family, because UCX uses it to find the address.
        match ours.network {
            Some(NetworkHeader::Ipv4) => wc.sl = IPV4_OVER_UDP,
            Some(NetworkHeader::Ipv6) => wc.sl = IPV6_OVER_UDP,
            None => {}
        }
    }
    wc
}
