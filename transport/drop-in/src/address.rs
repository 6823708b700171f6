//! Address handles.

use std::ffi::c_int;

use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::ah_attr_of;
use riser_transport::verbs::{AhId, Verbs as _};

use crate::context::Context;
use crate::errno::{Errno, number, pointer};
use crate::memory::Pd;
use crate::object::{Ref, kind};

/// An address handle.
pub(crate) struct Ah {
    context: Ref<Context>,
    pub(crate) id: AhId,
}

kind!(Ah, ibv_ah, b"addr");

/// `ibv_create_ah(3)`.
pub(crate) unsafe extern "C" fn ibv_create_ah(
    pd: *mut ibv_pd,
    attr: *mut ibv_ah_attr,
) -> *mut ibv_ah {
    // SAFETY: the program's pointers, as the manual page demands.
    pointer(unsafe { Ref::<Pd>::get(pd) }.and_then(|pd| {
        // SAFETY: as above.
        let attr = unsafe { &*attr };
        // Without a global route there is no address on RoCE.
        if attr.is_global == 0 {
            return Err(Errno::INVALID);
        }
        let id = pd.context.lock().nic.create_ah(pd.id, ah_attr_of(attr))?;
        let c = ibv_ah {
            context: pd.context.handle(),
            pd: pd.handle(),
            handle: id.0.index() as u32,
        };
        let context = pd.context;
        Ok(Ref::new(c, Ah { context, id }).handle())
    }))
}

/// `ibv_destroy_ah(3)`.
pub(crate) unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: the program's pointer, as the manual page demands.
    number(unsafe { Ref::<Ah>::get(ah) }.and_then(|ah| {
        ah.context.lock().nic.destroy_ah(ah.id)?;
        ah.retire()
    }))
}
