//! libibverbs and librdmacm, loaded at run time.
//!
//! We don't link against rdma-core, so the same binary runs on hosts with and without it:
//! [`RdmaCore::load`] opens the two libraries and looks up each function once, at the symbol
//! version that matches the structures in [`bindings`]. The data path (post, poll, arm) does not
//! need symbols. It uses the operation table of an opened context, via the functions of [`ops`].
//!
//! The structures are defined in the headers of rdma-core 44.0. `generate.sh` generates them
//! with bindgen, including compile-time assertions about sizes and offsets on x86-64. Their
//! copyright notice and license are at the top of `bindings.rs`.

#![allow(unsafe_code, reason = "this crate is the boundary to two C libraries")]

#[allow(
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    clippy::undocumented_unsafe_blocks,
    reason = "generated from C headers"
)]
pub mod bindings;
pub mod ops;

use std::ffi::{CStr, c_char, c_int, c_void};

use bindings::*;
use thiserror::Error;

/// Error returned if rdma-core cannot be used on this host.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A library is not installed, or cannot be opened.
    #[error("{library}: {source}")]
    Library {
        /// File name of the library.
        library: &'static str,
        /// Error returned by the dynamic linker.
        source: libloading::Error,
    },
    /// A library is too old, or is a different library.
    #[error("{library} has no symbol {symbol} at version {version}")]
    Symbol {
        /// File name of the library.
        library: &'static str,
        /// Name of the missing function.
        symbol: &'static str,
        /// The required symbol version.
        version: &'static str,
    },
}

/// Declares a function table. Each entry contains the name of a function, its symbol version and
/// its type.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident from $library:literal {
        $($name:ident @ $version:literal: fn($($arg:ty),*) $(-> $ret:ty)?;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $table {
            $(
                #[doc = concat!("`", stringify!($name), "` at symbol version `", $version, "`.")]
                pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,
            )*
        }

        impl $table {
            /// File name passed to the dynamic linker.
            pub const LIBRARY: &'static str = $library;

            fn load(handle: *mut c_void) -> Result<Self, LoadError> {
                Ok(Self {
                    $($name: {
                        let symbol = lookup(
                            handle,
                            $library,
                            stringify!($name),
                            concat!(stringify!($name), "\0"),
                            $version,
                            concat!($version, "\0"),
                        )?;
                        // SAFETY: the symbol version determines the function's signature, and this
                        // type matches the declaration in rdma-core's header of that version.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(symbol) }
                    },)*
                })
            }
        }
    };
}

/// Extended request to join a multicast group (`struct rdma_cm_join_mc_attr_ex`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(
    non_camel_case_types,
    reason = "named as the structures of the headers"
)]
pub struct rdma_cm_join_mc_attr_ex {
    /// Mask of valid fields: [`JOIN_MC_ADDRESS`] and [`JOIN_MC_FLAGS`].
    pub comp_mask: u32,
    /// Type of membership: [`JOIN_MC_FULL_MEMBER`] or [`JOIN_MC_SEND_ONLY`].
    pub join_flags: u32,
    /// Address of the group.
    pub addr: *mut sockaddr,
}

/// `addr` is valid.
pub const JOIN_MC_ADDRESS: u32 = 1;
/// `join_flags` is valid.
pub const JOIN_MC_FLAGS: u32 = 2;
/// Receive the group's datagrams.
pub const JOIN_MC_FULL_MEMBER: u32 = 0;
/// Only send datagrams to the group.
pub const JOIN_MC_SEND_ONLY: u32 = 1;

functions! {
    /// Functions of libibverbs used by the provider.
    Verbs from "libibverbs.so.1" {
        ibv_get_device_list @ "IBVERBS_1.1": fn(*mut c_int) -> *mut *mut ibv_device;
        ibv_free_device_list @ "IBVERBS_1.1": fn(*mut *mut ibv_device);
        ibv_get_device_name @ "IBVERBS_1.1": fn(*mut ibv_device) -> *const c_char;
        ibv_get_device_guid @ "IBVERBS_1.1": fn(*mut ibv_device) -> u64;
        ibv_open_device @ "IBVERBS_1.1": fn(*mut ibv_device) -> *mut ibv_context;
        ibv_close_device @ "IBVERBS_1.1": fn(*mut ibv_context) -> c_int;
        ibv_query_device @ "IBVERBS_1.1": fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        ibv_query_port @ "IBVERBS_1.1": fn(*mut ibv_context, u8, *mut _compat_ibv_port_attr) -> c_int;
        ibv_query_gid @ "IBVERBS_1.1": fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        ibv_query_pkey @ "IBVERBS_1.1": fn(*mut ibv_context, u8, c_int, *mut u16) -> c_int;
        ibv_alloc_pd @ "IBVERBS_1.1": fn(*mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd @ "IBVERBS_1.1": fn(*mut ibv_pd) -> c_int;
        ibv_reg_mr @ "IBVERBS_1.1": fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        ibv_reg_mr_iova @ "IBVERBS_1.7": fn(*mut ibv_pd, *mut c_void, usize, u64, c_int) -> *mut ibv_mr;
        ibv_rereg_mr @ "IBVERBS_1.1": fn(*mut ibv_mr, c_int, *mut ibv_pd, *mut c_void, usize, c_int) -> c_int;
        ibv_dereg_mr @ "IBVERBS_1.1": fn(*mut ibv_mr) -> c_int;
        ibv_create_comp_channel @ "IBVERBS_1.0": fn(*mut ibv_context) -> *mut ibv_comp_channel;
        ibv_destroy_comp_channel @ "IBVERBS_1.0": fn(*mut ibv_comp_channel) -> c_int;
        ibv_create_cq @ "IBVERBS_1.1": fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        ibv_resize_cq @ "IBVERBS_1.1": fn(*mut ibv_cq, c_int) -> c_int;
        ibv_destroy_cq @ "IBVERBS_1.1": fn(*mut ibv_cq) -> c_int;
        ibv_get_cq_event @ "IBVERBS_1.1": fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events @ "IBVERBS_1.1": fn(*mut ibv_cq, u32);
        ibv_create_srq @ "IBVERBS_1.1": fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
        ibv_modify_srq @ "IBVERBS_1.1": fn(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
        ibv_query_srq @ "IBVERBS_1.1": fn(*mut ibv_srq, *mut ibv_srq_attr) -> c_int;
        ibv_destroy_srq @ "IBVERBS_1.1": fn(*mut ibv_srq) -> c_int;
        ibv_create_qp @ "IBVERBS_1.1": fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        ibv_query_qp @ "IBVERBS_1.1": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
        ibv_modify_qp @ "IBVERBS_1.1": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        ibv_destroy_qp @ "IBVERBS_1.1": fn(*mut ibv_qp) -> c_int;
        ibv_create_ah @ "IBVERBS_1.1": fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
        ibv_destroy_ah @ "IBVERBS_1.1": fn(*mut ibv_ah) -> c_int;
        ibv_attach_mcast @ "IBVERBS_1.1": fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
        ibv_detach_mcast @ "IBVERBS_1.1": fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
        ibv_get_async_event @ "IBVERBS_1.1": fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ibv_ack_async_event @ "IBVERBS_1.1": fn(*mut ibv_async_event);
    }
}

functions! {
    /// Functions of librdmacm used by the provider.
    Cm from "librdmacm.so.1" {
        rdma_create_event_channel @ "RDMACM_1.0": fn() -> *mut rdma_event_channel;
        rdma_destroy_event_channel @ "RDMACM_1.0": fn(*mut rdma_event_channel);
        rdma_create_id @ "RDMACM_1.0": fn(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, rdma_port_space) -> c_int;
        rdma_destroy_id @ "RDMACM_1.0": fn(*mut rdma_cm_id) -> c_int;
        rdma_bind_addr @ "RDMACM_1.0": fn(*mut rdma_cm_id, *mut sockaddr) -> c_int;
        rdma_resolve_addr @ "RDMACM_1.0": fn(*mut rdma_cm_id, *mut sockaddr, *mut sockaddr, c_int) -> c_int;
        rdma_resolve_route @ "RDMACM_1.0": fn(*mut rdma_cm_id, c_int) -> c_int;
        rdma_create_ep @ "RDMACM_1.0": fn(*mut *mut rdma_cm_id, *mut rdma_addrinfo, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int;
        rdma_migrate_id @ "RDMACM_1.0": fn(*mut rdma_cm_id, *mut rdma_event_channel) -> c_int;
        rdma_create_qp_ex @ "RDMACM_1.0": fn(*mut rdma_cm_id, *mut ibv_qp_init_attr_ex) -> c_int;
        rdma_destroy_qp @ "RDMACM_1.0": fn(*mut rdma_cm_id);
        rdma_listen @ "RDMACM_1.0": fn(*mut rdma_cm_id, c_int) -> c_int;
        rdma_connect @ "RDMACM_1.0": fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        rdma_accept @ "RDMACM_1.0": fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        rdma_reject @ "RDMACM_1.0": fn(*mut rdma_cm_id, *const c_void, u8) -> c_int;
        rdma_notify @ "RDMACM_1.0": fn(*mut rdma_cm_id, ibv_event_type) -> c_int;
        rdma_disconnect @ "RDMACM_1.0": fn(*mut rdma_cm_id) -> c_int;
        rdma_get_cm_event @ "RDMACM_1.0": fn(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
        rdma_ack_cm_event @ "RDMACM_1.0": fn(*mut rdma_cm_event) -> c_int;
        rdma_set_option @ "RDMACM_1.0": fn(*mut rdma_cm_id, c_int, c_int, *mut c_void, usize) -> c_int;
        rdma_set_local_ece @ "RDMACM_1.3": fn(*mut rdma_cm_id, *mut ibv_ece) -> c_int;
        rdma_get_remote_ece @ "RDMACM_1.3": fn(*mut rdma_cm_id, *mut ibv_ece) -> c_int;
        rdma_reject_ece @ "RDMACM_1.3": fn(*mut rdma_cm_id, *const c_void, u8) -> c_int;
        rdma_establish @ "RDMACM_1.2": fn(*mut rdma_cm_id) -> c_int;
        rdma_init_qp_attr @ "RDMACM_1.2": fn(*mut rdma_cm_id, *mut ibv_qp_attr, *mut c_int) -> c_int;
        rdma_join_multicast_ex @ "RDMACM_1.1": fn(*mut rdma_cm_id, *mut rdma_cm_join_mc_attr_ex, *mut c_void) -> c_int;
        rdma_leave_multicast @ "RDMACM_1.0": fn(*mut rdma_cm_id, *mut sockaddr) -> c_int;
        rdma_get_src_port @ "RDMACM_1.0": fn(*mut rdma_cm_id) -> u16;
    }
}

/// Both libraries. They are never unloaded, because devices have threads and fork handlers that
/// need their code.
#[derive(Clone, Copy, Debug)]
pub struct RdmaCore {
    /// Functions of libibverbs.
    pub verbs: Verbs,
    /// Functions of librdmacm.
    pub cm: Cm,
}

impl RdmaCore {
    /// Opens both libraries and looks up all functions.
    ///
    /// # Errors
    /// Returns a [`LoadError`] that names the missing library or symbol.
    pub fn load() -> Result<Self, LoadError> {
        Ok(Self {
            verbs: Verbs::load(open(Verbs::LIBRARY)?)?,
            cm: Cm::load(open(Cm::LIBRARY)?)?,
        })
    }
}

/// Opens a library permanently and returns the dynamic linker's handle.
fn open(library: &'static str) -> Result<*mut c_void, LoadError> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: loading rdma-core runs its initializers, which have no preconditions.
    unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL) }
        // Never closed, because devices have threads and fork handlers that need its code.
        .map(Library::into_raw)
        .map_err(|source| LoadError::Library { library, source })
}

fn lookup(
    handle: *mut c_void,
    library: &'static str,
    symbol: &'static str,
    symbol_z: &'static str,
    version: &'static str,
    version_z: &'static str,
) -> Result<*mut c_void, LoadError> {
    let missing = LoadError::Symbol {
        library,
        symbol,
        version,
    };
    let (Ok(name), Ok(at)) = (
        CStr::from_bytes_with_nul(symbol_z.as_bytes()),
        CStr::from_bytes_with_nul(version_z.as_bytes()),
    ) else {
        return Err(missing);
    };
    // We need the version, because a library may have multiple functions with the same name, but
    // different structures.
    // SAFETY: the handle is open, and both strings are NUL-terminated.
    let address = unsafe { libc::dlvsym(handle, name.as_ptr(), at.as_ptr()) };
    if address.is_null() {
        Err(missing)
    } else {
        Ok(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_succeeds_or_names_missing_symbol() {
        match RdmaCore::load() {
            Ok(core) => {
                let mut count = -1;
                // SAFETY: the function initializes the count and returns a list or null.
                let list = unsafe { (core.verbs.ibv_get_device_list)(&raw mut count) };
                if !list.is_null() {
                    assert!(count >= 0);
                    // SAFETY: the list was returned by the call above.
                    unsafe { (core.verbs.ibv_free_device_list)(list) };
                }
            }
            Err(e) => assert!(e.to_string().starts_with("lib"), "{e}"),
        }
    }

    #[test]
    fn unknown_symbol_version_is_error() {
        let Ok(handle) = open("libc.so.6") else {
            panic!("no C library")
        };
        let r = lookup(
            handle,
            "libc.so.6",
            "malloc",
            "malloc\0",
            "GLIBC_0.0",
            "GLIBC_0.0\0",
        );
        assert!(matches!(
            r,
            Err(LoadError::Symbol {
                symbol: "malloc",
                ..
            })
        ));
        assert!(open("libnothing-of-that-name.so").is_err());
    }
}
