//! Opening devices: what a context's tables of functions have.

use std::mem::{size_of, zeroed};
use std::ptr;

use riser_rdma_core_sys::bindings::*;
use tracing::error;

use crate::context::{Context, query_device_ex, query_port, query_rt_values};
use crate::cq::{poll_cq, req_notify_cq};
use crate::cq_ex::create_cq_ex;
use crate::devices::Device;
use crate::engine::Engine;
use crate::errno::{Errno, pointer};
use crate::object::Ref;
use crate::post::{post_recv, post_send, post_srq_recv};
use crate::qp::{create_qp_ex, create_srq_ex};
use crate::queue::EventQueue;

/// Marks a context that has the table of extended functions.
const EXTENDED: usize = usize::MAX;

/// `ibv_open_device(3)`.
pub(crate) unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    pointer(Device::get(device).and_then(open).map(Ref::handle))
}

/// Opens a device.
///
/// # Errors
/// Those of [`Engine::open`].
pub(crate) fn open(device: &'static Device) -> Result<Ref<Context>, Errno> {
    let config = &device.config;
    let engine = Engine::open(&config.clone()).map_err(|error| {
        let (name, addr) = (&config.name, config.addr);
        error!("cannot open {name} at {addr}: {error}");
        Errno::from(error)
    })?;
    let events = EventQueue::new()?;
    // SAFETY: all-zero bytes are valid: no function, no descriptor, an unlocked mutex.
    let mut c: verbs_context = unsafe { zeroed() };
    c.context.device = device.handle();
    c.context.cmd_fd = -1;
    c.context.async_fd = events.raw_fd();
    c.context.num_comp_vectors = 1;
    c.context.abi_compat = ptr::without_provenance_mut(EXTENDED);
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
    c.create_qp_ex = Some(create_qp_ex);
    c.create_srq_ex = Some(create_srq_ex);
    let context = Ref::new(
        c,
        Context {
            device,
            engine,
            events,
        },
    );
    let mut locked = context.lock();
    locked.contexts.insert(context.number(), Box::new(context));
    drop(locked);
    Ok(context)
}
