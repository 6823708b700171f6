//! Address handles.

use std::ffi::c_int;

use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::{ah_attr, ah_attr_of};
use riser_transport::verbs::{
    AhAttr, AhId, Completion, GRH_LEN, Handle, QpId, RouteHeader, Verbs as _, WcOpcode, WcStatus,
    WrId,
};

use crate::context::{Context, context_of};
use crate::domain::Pd;
use crate::errno::{Errno, minus, number, pointer};
use crate::object::{Ref, kind};

/// An address handle.
pub(crate) struct Ah {
    pub(crate) context: Ref<Context>,
    pub(crate) id: AhId,
}

kind!(Ah, ibv_ah, b"addr");

/// `ibv_create_ah(3)`.
pub(crate) unsafe extern "C" fn ibv_create_ah(
    pd: *mut ibv_pd,
    attr: *mut ibv_ah_attr,
) -> *mut ibv_ah {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe { Ref::<Pd>::get(pd) }.and_then(|pd| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::INVALID)?;
        // On RoCE, we need a GRH to determine the address.
        if attr.is_global == 0 {
            return Err(Errno::INVALID);
        }
        create(pd, ah_attr_of(attr)).map(Ref::handle)
    }))
}

fn create(pd: Ref<Pd>, attr: AhAttr) -> Result<Ref<Ah>, Errno> {
    let context = pd.context;
    let id = context.lock().nic.create_ah(pd.id, attr)?;
    let c = ibv_ah {
        context: context.handle(),
        pd: pd.handle(),
        handle: id.0.index() as u32,
    };
    Ok(Ref::new(c, Ah { context, id }))
}

/// Returns the path to the sender of a datagram.
///
/// # Safety
/// `wc` must be a completion of the program, and `grh` the 40 bytes in front of the datagram.
unsafe fn way_back(
    context: Ref<Context>,
    port: u8,
    wc: *const ibv_wc,
    grh: *const [u8; GRH_LEN],
) -> Result<AhAttr, Errno> {
    // SAFETY: guaranteed by the caller.
    let (wc, grh) = unsafe { (wc.as_ref().ok_or(Errno::INVALID)?, grh.as_ref()) };
    // On RoCE, we need the GRH to determine the path.
    let grh = grh.filter(|_| wc.wc_flags & IBV_WC_GRH != 0);
    let grh = grh.ok_or(Errno::INVALID)?;
    let placeholder = QpId(Handle::new(0, 0));
    let completion = Completion {
        src_qp: wc.src_qp,
        network: Some(RouteHeader::parse(grh)?.network()),
        ..Completion::new(
            WrId(wc.wr_id),
            WcStatus::Success,
            WcOpcode::Recv,
            placeholder,
            wc.qp_num,
        )
    };
    Ok(context.lock().nic.ah_from_wc(port, &completion, grh)?)
}

/// `ibv_init_ah_from_wc(3)`.
pub(crate) unsafe extern "C" fn ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut [u8; GRH_LEN],
    attr: *mut ibv_ah_attr,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    minus(unsafe {
        context_of(context).and_then(|context| {
            let ours = way_back(context, port, wc, grh)?;
            attr.write(ah_attr(&ours));
            Ok(())
        })
    })
}

/// `ibv_create_ah_from_wc(3)`.
pub(crate) unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut [u8; GRH_LEN],
    port: u8,
) -> *mut ibv_ah {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe {
        Ref::<Pd>::get(pd).and_then(|pd| {
            let attr = way_back(pd.context, port, wc, grh)?;
            create(pd, attr).map(Ref::handle)
        })
    })
}

/// `ibv_destroy_ah(3)`.
pub(crate) unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Ah>::get(ah) }.and_then(|ah| {
        ah.context.lock().nic.destroy_ah(ah.id)?;
        ah.retire()
    }))
}
