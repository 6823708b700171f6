//! Handles LUNs if their backend is changed.

use std::fmt;

use riser_config::Config;
use serde_json::Value;

use crate::convert::luns::{backend, remove_lun};
use crate::world::World;

/// A LUN of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChangedLun {
    target: String,
    number: String,
}

impl fmt::Display for ChangedLun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LUN {} of {}", self.number, self.target)
    }
}

/// Removes all LUNs with a different backend than in the previous document.
pub(super) fn remove_changed(before: &Value, document: &mut Value) -> Vec<ChangedLun> {
    let backends = before["backends"].as_object().into_iter().flatten();
    let changed = backends.filter(|(name, doc)| {
        let new = document["backends"].get(name);
        new.is_some_and(|new| new != *doc)
    });
    let changed: Vec<String> = changed.map(|(name, _)| name.clone()).collect();
    let mut removed = Vec::new();
    for target in document["targets"].as_array_mut().into_iter().flatten() {
        let name = target["name"].as_str().unwrap_or_default().to_owned();
        let luns = target["luns"].as_object().into_iter().flatten();
        let is_changed = |lun: &Value| changed.iter().any(|name| backend(lun) == Some(name));
        let luns = luns.filter(|(_, lun)| is_changed(lun));
        let numbers: Vec<String> = luns.map(|(number, _)| number.clone()).collect();
        for number in numbers {
            remove_lun(target, &number);
            removed.push(ChangedLun {
                target: name.clone(),
                number,
            });
        }
    }
    removed
}

/// Adds removed LUNs to the current document of the daemon, by replacing their targets and backends
/// with the values from `document`. Returns false if any of these were changed by another user
/// since they were removed (`without`).
pub(super) fn add(
    removed: &[ChangedLun],
    without: &Value,
    document: &Value,
    current: &mut Value,
) -> bool {
    let (expected, found) = (normal(without), normal(current));
    for lun in removed {
        let name = lun.target.as_str();
        let current_target = target(&found, name);
        if current_target.is_none() || current_target != target(&expected, name) {
            return false;
        }
        let targets = current["targets"].as_array_mut().into_iter().flatten();
        let mut targets = targets.filter(|target| target["name"] == name);
        let (Some(place), Some(target)) = (targets.next(), target(document, name)) else {
            return false;
        };
        place.clone_from(target);
    }
    for (name, backend) in document["backends"].as_object().into_iter().flatten() {
        if without["backends"].get(name) == Some(backend) {
            continue;
        }
        if found["backends"].get(name) != expected["backends"].get(name) {
            return false;
        }
        current["backends"][name].clone_from(backend);
    }
    true
}

/// Converts a document to the daemon's format.
fn normal(document: &Value) -> Value {
    let config = Config::parse(&document.to_string(), "configfs");
    config.map_or(Value::Null, |config| config.to_value())
}

fn target<'a>(document: &'a Value, name: &str) -> Option<&'a Value> {
    let mut targets = document["targets"].as_array().into_iter().flatten();
    targets.find(|target| target["name"] == name)
}

/// Returns true if any of these LUNs could be in use by a session. We check if the target has a
/// session and the LUN has executed commands.
pub(super) fn is_used(luns: &[ChangedLun], world: &dyn World) -> bool {
    let sessions = world.sessions();
    let live = world.live();
    luns.iter().any(|lun| {
        let mut sessions = sessions.iter();
        let commands = live
            .luns
            .iter()
            .filter(|known| known.target == lun.target && known.lun.to_string() == lun.number);
        let commands: u64 = commands
            .flat_map(|known| known.ops.values())
            .map(|op| op.commands)
            .sum();
        commands > 0 && sessions.any(|session| session.target == lun.target)
    })
}
