//! Mounts the tree using FUSE.

mod fs;
mod mount;

pub use self::mount::Mount;
