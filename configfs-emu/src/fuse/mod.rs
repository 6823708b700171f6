//! The tree as a file system of FUSE.

mod fs;
mod mount;

pub use self::mount::Mount;
