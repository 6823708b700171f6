//! The exported symbols; `build.rs` writes the jumps.

use std::ffi::{c_int, c_void};

use crate::address::*;
use crate::async_events::*;
use crate::cm::*;
use crate::context::*;
use crate::cq::*;
use crate::devices::*;
use crate::dm::*;
use crate::domain::*;
use crate::errno::{Errno, number, pointer};
use crate::kernel::*;
use crate::memory::*;
use crate::names::*;
use crate::neighbor::*;
use crate::open::*;
use crate::qp::*;
use crate::umad::*;
use crate::window::*;

include!(concat!(env!("OUT_DIR"), "/exports.rs"));

/// A function that is not provided and returns an error number.
extern "C" fn absent_errno() -> c_int {
    number(Err(Errno::UNSUPPORTED))
}

/// A call of rsocket(7), which returns an `int`, a length or an offset: -1 in all of their widths.
extern "C" fn absent_socket() -> isize {
    Errno::UNSUPPORTED.set();
    -1
}

/// A function that is not provided and returns a pointer.
extern "C" fn absent_null() -> *mut c_void {
    pointer(Err(Errno::UNSUPPORTED))
}
