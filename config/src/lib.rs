//! The configuration of `riserd`: parses YAML into checked values.
//!
//! [`Config::parse`] is a pure function: it returns a [`Config`] or a single [`ConfigError`] with
//! the file, line, column and path. It does not open, resolve or create anything; this is done when
//! the server starts. So this crate does not depend on the daemon, and programs that only read or
//! edit configurations, such as `riserd-configfs`, do not need to link it.
//!
//! # Modules
//! - `model`: [`Config`] and its parts, as used by the daemon; `source`: the sources of backends;
//!   `io_limits`: rate limits for backends and initiators, which are checked by `io_check`;
//!   `listen`: portal addresses.
//! - `raw`: the schema of the file, before any checks across keys. It declares each key once with
//!   its description, default and limits; `bounded`: numbers and sizes with limits.
//! - `parse`, `check`, `mistake`: convert `raw` to `model`, and check ranges, references and
//!   duplicates.
//! - `to_raw`: converts `model` back to `raw`. `show`: converts `raw` to JSON and YAML, for
//!   [`Config::to_value`] and [`Config::to_yaml`]. `diff`: differences between two files.
//! - `schema`: the JSON Schema, for editors. `shape`: schema lookup for a single path.
//! - `edit`: [`Document`]: configuration objects by path. `object_path`: [`ObjectPath`]. `items`:
//!   names of list items.
//! - `patch`: [`Patch`], a change in JSON format.
//! - `value`: scalar types: sizes, GUIDs, addresses, percentages.
//! - `yaml`: the wrapper around the YAML library.
//! - `identity`: [`HostId`] and the names derived from it.
//! - `error`: [`ConfigError`].
//! - `faults`: injected errors and delays, which tests can add to a [`Spec`]. They cannot be
//!   configured by key.
//! - [`mounts`]: mounts that must not contain a configured path.
//!
//! # Rules
//! - Unknown keys, duplicate keys, invalid types and values out of range are always errors.
//! - Access is denied unless a rule or `access: open` allows it.
//! - Derived default names must not depend on data that can change on restart.

mod bounded;
mod check;
mod diff;
mod edit;
mod error;
mod faults;
mod identity;
mod io_check;
mod io_limits;
mod items;
mod listen;
mod mistake;
mod model;
pub mod mounts;
mod object_path;
mod parse;
mod patch;
mod raw;
mod schema;
mod shape;
mod show;
mod source;
mod to_raw;
mod value;
mod yaml;

pub use diff::{Difference, diff};
pub use edit::{Document, EditError, Found};
pub use error::ConfigError;
pub use faults::{Fault, FaultOn, Faults};
pub use identity::HostId;
pub use io_limits::{BURST, IoLimits, MAX_WAIT};
pub use listen::{Listen, Wildcard};
pub use model::{
    Access, Backend, Chap, ChapUser, Config, DATA_OUT_TIMEOUT, Limits, LinkFaults, Location, Log,
    LogFormat, Lun, MAX_SESSIONS, MAX_WORKERS, Metrics, Names, Portal, Protocol, Provider,
    Redirect, Rule, RuleLuns, RuleSubject, Secret, SeenLun, Target, Transport, WINDOW, Workers,
};
pub use object_path::ObjectPath;
pub use patch::Patch;
pub use schema::schema;
pub use shape::{Kind, Scalar, Shape};
pub use show::{masked, to_yaml};
pub use source::{Direct, Source, Spec, TagOwner};
pub use value::{Guid, InitiatorId, Net, Percent};

#[cfg(test)]
mod tests;
