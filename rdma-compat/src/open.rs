//! Opening devices: the function tables of a context.

use std::ffi::c_int;
use std::mem::{size_of, zeroed};
use std::ptr;
use std::sync::Arc;

use riser_rdma_core_sys::bindings::*;
use riser_transport::verbs::Verbs as _;
use tracing::error;

use crate::command::{Command, Duplicate};
use crate::context::{Context, query_device_ex, query_port, query_rt_values};
use crate::cq::{modify_cq, poll_cq, req_notify_cq};
use crate::cq_ex::create_cq_ex;
use crate::devices::{Device, devices};
use crate::dm::{alloc_dm, free_dm, reg_dm_mr};
use crate::domain::{alloc_parent_domain, alloc_td, close_xrcd, dealloc_td, open_xrcd};
use crate::engine::Engine;
use crate::errno::{Errno, pointer};
use crate::object::Ref;
use crate::post::{post_recv, post_send, post_srq_recv};
use crate::post_ex::create_qp_ex;
use crate::qp::{create_srq_ex, get_srq_num, modify_qp_rate_limit, open_qp};
use crate::queue::EventQueue;
use crate::window::{advise_mr, alloc_mw, alloc_null_mr, bind_mw, dealloc_mw};

/// Marks a context that has an extended function table.
const EXTENDED: usize = usize::MAX;

/// `ibv_open_device(3)`.
pub(crate) unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    pointer(Device::get(device).and_then(open).map(Ref::handle))
}

/// Opens a device.
///
/// # Errors
/// Returns errors of [`Engine::open`].
pub(crate) fn open(device: &'static Device) -> Result<Ref<Context>, Errno> {
    open_on(device, engine(device)?)
}

/// Opens a device using its engine.
///
/// # Errors
/// Returns errors of creating descriptors.
pub(crate) fn open_on(device: &'static Device, engine: Arc<Engine>) -> Result<Ref<Context>, Errno> {
    open_by(device, engine, || Command::new(device.index))
}

/// `ibv_import_device(3)`: opens the device of an existing context, using a duplicate of its
/// command descriptor.
pub(crate) unsafe extern "C" fn ibv_import_device(fd: c_int) -> *mut ibv_context {
    pointer(Duplicate::get(fd).and_then(|duplicate| {
        let device = devices().get(duplicate.device).ok_or(Errno::INVALID)?;
        // SAFETY: the program transfers ownership of the descriptor, but keeps it on error.
        let take = || Ok(unsafe { duplicate.into_command() });
        open_by(device, engine(device)?, take).map(Ref::handle)
    }))
}

/// Returns the engine of a device.
///
/// # Errors
/// Returns errors of [`Engine::open`].
pub(crate) fn engine(device: &'static Device) -> Result<Arc<Engine>, Errno> {
    let config = &device.config;
    // This must be done before there are any locks that could be held during a fork.
    crate::fork::install();
    Engine::open(config).map_err(|error| {
        let (name, addr) = (&config.name, config.addr);
        error!("cannot open {name} at {addr}: {error}");
        Errno::from(error)
    })
}

/// Opens a device. The command descriptor is created last, by `make`.
fn open_by(
    device: &'static Device,
    engine: Arc<Engine>,
    make: impl FnOnce() -> Result<Command, Errno>,
) -> Result<Ref<Context>, Errno> {
    let events = EventQueue::new()?;
    // SAFETY: all zeroes is valid: no functions, no descriptor, an unlocked mutex.
    let mut c: verbs_context = unsafe { zeroed() };
    c.context.device = device.handle();
    let command = make()?;
    c.context.cmd_fd = command.raw_fd();
    c.context.async_fd = events.raw_fd();
    c.context.abi_compat = ptr::without_provenance_mut(EXTENDED);
    c.context.ops.alloc_mw = Some(alloc_mw);
    c.context.ops.bind_mw = Some(bind_mw);
    c.context.ops.dealloc_mw = Some(dealloc_mw);
    c.context.ops.poll_cq = Some(poll_cq);
    c.context.ops.req_notify_cq = Some(req_notify_cq);
    c.context.ops.post_send = Some(post_send);
    c.context.ops.post_recv = Some(post_recv);
    c.context.ops.post_srq_recv = Some(post_srq_recv);
    c.sz = size_of::<verbs_context>();
    c.query_port = Some(query_port);
    c.query_device_ex = Some(query_device_ex);
    c.query_rt_values = Some(query_rt_values);
    c.create_cq_ex = Some(create_cq_ex);
    c.modify_cq = Some(modify_cq);
    c.create_qp_ex = Some(create_qp_ex);
    c.modify_qp_rate_limit = Some(modify_qp_rate_limit);
    c.open_qp = Some(open_qp);
    c.create_srq_ex = Some(create_srq_ex);
    c.get_srq_num = Some(get_srq_num);
    c.open_xrcd = Some(open_xrcd);
    c.close_xrcd = Some(close_xrcd);
    c.alloc_td = Some(alloc_td);
    c.dealloc_td = Some(dealloc_td);
    c.alloc_parent_domain = Some(alloc_parent_domain);
    c.alloc_null_mr = Some(alloc_null_mr);
    c.advise_mr = Some(advise_mr);
    c.alloc_dm = Some(alloc_dm);
    c.free_dm = Some(free_dm);
    c.reg_dm_mr = Some(reg_dm_mr);
    let context = Ref::new(
        c,
        Context {
            device,
            engine,
            events,
            command,
        },
    );
    let mut locked = context.lock();
    let vectors = locked.nic.device_attr().comp_vectors;
    // SAFETY: the program has no access to the context yet.
    unsafe { (*context.handle()).num_comp_vectors = vectors as c_int };
    locked.contexts.insert(context.number(), Box::new(context));
    drop(locked);
    Ok(context)
}
