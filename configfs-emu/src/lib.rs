//! Emulates LIO's configfs tree, so that `targetcli`, `rtslib` and scripts can be used to configure
//! `riserd`.
//!
//! These tools use a file system to configure the SCSI target in the kernel: a directory is a
//! backstore, target or initiator, its files are attributes, and links define which backstore is
//! exported by a target. This crate provides the same tree for `riserd`. The program is
//! `riserd-configfs`.
//!
//! # Modules
//! - [`tree`]: directories, files and links, using the rules of configfs. [`rules`]: the rules of
//!   LIO, which define the allowed directories, the contents of files, the effect of writes, and the
//!   error number if an operation is rejected.
//! - [`world`]: a trait with the information about the host and its sessions that is required by
//!   the tree. [`host`]: implements this for a real host.
//! - [`convert`]: converts a tree to a `riserd` configuration, and back.
//! - [`engine`]: applies changes of the tree to a daemon, and updates the tree when the
//!   configuration is changed by other users. [`daemon`]: connects to a running `riserd` via its
//!   admin socket. [`fuse`]: mounts the tree.
//! - [`saved`]: converts between a tree and `saveconfig.json`. This is not part of `riserd`,
//!   because the meaning of this file depends on the rules of LIO.
//! - [`number`]: parses numbers using the same rules as the kernel.
//!
//! # I/O model
//! `tree`, `rules`, `convert` and `engine` don't do any I/O: they use the traits [`world::World`]
//! and [`engine::Daemon`] instead.
//!
//! # Invariants
//! - If an operation fails, it must not change the tree or the daemon.
//! - Converting a configuration to a tree and back must return the same configuration, except for
//!   any changes made in the tree.
//! - Access must never be wider than in LIO: if something can't be expressed, it must be rejected.
//! - A change always replaces the configuration shown by the tree, so it never reverts changes made
//!   by other users.
//! - We don't store anything here: the daemon keeps its configuration, and when a tree is mounted
//!   again, it will show this configuration. Anything not supported by the daemon (portal groups
//!   that are not enabled, settings without an effect) is lost, same as in the kernel after a
//!   reboot.
//!
//! # Not implemented
//! - SCSI pass-through and user-space backstores.
//! - Port group states: the values are kept, but they have no effect.
//! - Sequence numbers in the `info` file of an initiator, which are always zero.
//! - Persistent reservations in `pr` and restoring registrations from `res_aptpl_metadata`:
//!   `riserd` keeps its own.
//! - Portal group tags other than 1 after the tree was mounted again.

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
