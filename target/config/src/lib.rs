//! The configuration of `riserd`: YAML in, checked values out.
//!
//! [`Config::parse`] is pure: text in, a [`Config`] or one [`ConfigError`] out, which names the
//! file, the line, the column and the place in the tree. Nothing is opened, resolved or created;
//! what a configuration asks for is tried when the server starts. So this crate knows no daemon,
//! and who only reads or edits configurations, such as `riserd-configfs`, links none.
//!
//! # Modules
//! - `model`: [`Config`] and its parts, as the rest of the daemon sees them; `source`: what
//!   backends are made of; `io_limits`: the limits of backends and initiators, which `io_check`
//!   checks; `listen`: the addresses of portals.
//! - `raw`: the schema as it is written, before anything is compared with anything: each key with
//!   its description, default and limits, once; `bounded`: numbers and sizes with limits.
//! - `parse`, `check`, `mistake`: from `raw` to `model`: ranges, references, duplicates.
//! - `to_raw`: from `model` back to `raw`. `show`: from there to JSON and YAML, which
//!   [`Config::to_value`] and [`Config::to_yaml`] give. `diff`: the differences of two files.
//! - `schema`: its JSON Schema, for editors. `shape`: the same, as a question about one place.
//! - `edit`: [`Document`]: objects of a configuration, by their paths. `object_path`:
//!   [`ObjectPath`]. `items`: what it calls the items of lists.
//! - `patch`: [`Patch`], a change as JSON.
//! - `value`: scalars with a meaning: sizes, GUIDs, addresses, percentages.
//! - `yaml`: the one place that knows the YAML library.
//! - `identity`: [`HostId`] and the names derived from it.
//! - `error`: [`ConfigError`].
//! - `faults`: errors and delays of a backend on purpose, which tests add to a [`Spec`]. No key
//!   leads there.
//! - [`mounts`]: mounts that no path of a configuration may lead to.
//!
//! # Rules
//! - Unknown keys, duplicate keys, wrong types and values out of range are errors, everywhere.
//! - Access is denied unless a rule allows it or `access: open` says so.
//! - Names derived by default depend on nothing that changes between restarts.

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
pub use source::{Direct, Source, Spec};
pub use value::{Guid, InitiatorId, Net, Percent};

#[cfg(test)]
mod tests;
