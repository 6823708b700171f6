//! LIO's configfs tree, emulated, so that `targetcli`, `rtslib` and scripts drive `riserd`.
//!
//! They configure the kernel's SCSI target through a file system: directories are backstores,
//! targets and initiators, files are their attributes, and links say what is served where. This
//! crate has the same tree over `riserd`. The program is `riserd-configfs`.
//!
//! # Modules
//! - [`tree`]: directories, files and links, with configfs's rules. [`rules`]: LIO's rules: what
//!   can be made where, what a write means, what a file says, and with which error number something
//!   is refused.
//! - [`world`]: what the tree must know of the host and of sessions, as a trait. [`host`]: it as it
//!   is.
//! - [`convert`]: from a tree to a configuration of `riserd`, and back.
//! - [`engine`]: a change of the tree takes effect in a daemon, or does not happen; what others
//!   change is shown. [`daemon`]: a running `riserd`, at its admin socket. [`fuse`]: the tree,
//!   mounted.
//! - [`saved`]: `saveconfig.json`, from a tree and to one. It is here and not in `riserd`, since
//!   only LIO's rules say what such a file means.
//! - [`number`]: numbers as the kernel reads them.
//!
//! # I/O model
//! `tree`, `rules`, `convert` and `engine` do none: what they need is behind the traits
//! [`world::World`] and [`engine::Daemon`].
//!
//! # Invariants
//! - An operation that fails changes nothing, neither in the tree nor in the daemon.
//! - A configuration comes back from the tree as it went in, but for what was changed there.
//! - No initiator sees more than with LIO: what cannot be expressed is refused.
//! - A change is made in place of the configuration that the tree shows: it never undoes what
//!   others did.
//! - Nothing is kept here: the daemon keeps its configuration, and a tree that is mounted again
//!   shows that. What it has no words for (portal groups that are not enabled, settings without
//!   effect) is then gone, as it is in the kernel after a reboot.
//!
//! # Not implemented
//! - SCSI pass-through and user-space backstores.
//! - The states of port groups: they are kept and have no effect.
//! - Sequence numbers in an initiator's `info`, which are zero.
//! - Persistent reservations in `pr`, and registrations that `res_aptpl_metadata` would restore:
//!   `riserd` keeps its own.
//! - The tag of a portal group other than 1, after the tree was mounted again.

pub mod convert;
pub mod daemon;
pub mod engine;
pub mod fuse;
pub mod host;
pub mod number;
pub mod rules;
pub mod saved;
#[cfg(test)]
mod testing;
pub mod tree;
pub mod world;
