//! The data of `riserd ls` and `riserd info`: the objects of a configuration with what a running
//! daemon says about them.

use riser_admin_api::live::{Live, LiveLun, LiveReservations};
use riser_admin_api::view::{LunView, SessionView, Status, TargetView};
use serde::Serialize;
use serde_json::{Value, json};

use crate::config::{Access, Config, Found, Kind, ObjectPath, Target, masked, to_yaml};
use crate::units::bytes;

/// A running daemon: what it is configured to, and how it goes.
#[derive(Debug)]
pub struct Facts {
    /// The configuration that is served.
    pub config: Config,
    /// Status of the daemon.
    pub status: Status,
    /// Targets that are served, with their LUNs.
    pub targets: Vec<TargetView>,
    /// Connections of initiators at present.
    pub sessions: Vec<SessionView>,
    /// Counters of the daemon since its start.
    pub live: Live,
}

/// An object, and those in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Path from the root.
    pub path: String,
    /// Last part of the path.
    pub name: String,
    /// A few words about it.
    pub summary: String,
    /// The objects in it.
    pub children: Vec<Node>,
}

/// An object in full.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Info {
    /// Path from the root.
    pub path: String,
    /// Description of such objects, from the schema.
    pub description: Option<String>,
    /// Keys that are set, with secrets masked.
    pub config: Value,
    /// The daemon's data about it; null if there are none.
    pub live: Value,
    /// Keys that are not set, and what they are.
    pub unset: Vec<(String, String)>,
}

/// The object at a path with those beneath it, `depth` levels deep.
#[must_use]
pub fn list(facts: &Facts, place: &ObjectPath, found: Found<'_>, depth: usize) -> Node {
    let segments = place.segments();
    let children = if depth > 0 {
        found.children()
    } else {
        Vec::new()
    };
    let child =
        |(name, found): (String, Found<'_>)| list(facts, &place.join(&name), found, depth - 1);
    let path = place.to_string();
    // With its escapes, so that a path can be put together from the tree.
    let name = path.rsplit('/').next().filter(|name| !name.is_empty());
    Node {
        name: name.unwrap_or("/").to_owned(),
        path,
        summary: facts.summary(segments, found),
        children: children.into_iter().map(child).collect(),
    }
}

/// The object at a path.
#[must_use]
pub fn info(facts: &Facts, place: &ObjectPath, found: Found<'_>) -> Info {
    let last = place.segments().last().map_or("", String::as_str);
    let config = found.value.map(|value| masked(value, last));
    let unset = found.unset().into_iter();
    Info {
        path: place.to_string(),
        description: found.shape.description().map(str::to_owned),
        config: config.unwrap_or_default(),
        live: facts.live(place.segments()),
        unset: unset.map(|(key, what)| (key, what.to_owned())).collect(),
    }
}

impl Facts {
    fn target(&self, name: &str) -> Option<&Target> {
        self.config.targets.iter().find(|t| t.name == name)
    }

    fn sessions_of(&self, target: &str) -> Vec<&SessionView> {
        let sessions = self.sessions.iter();
        sessions.filter(|s| s.target == target).collect()
    }

    /// A logical unit, and what was counted of it.
    fn lun(&self, target: &str, number: &str) -> Option<(&LunView, Option<&LiveLun>)> {
        let number: u16 = number.parse().ok()?;
        let view = self.targets.iter().find(|t| t.name == target)?;
        let mut live = self.live.luns.iter();
        let live = live.find(|lun| lun.target == target && lun.lun == number);
        Some((view.luns.get(&number)?, live))
    }

    /// The logical units on a backend, as target and number.
    fn users(&self, backend: &str) -> Vec<(&str, u16)> {
        let targets = self.config.targets.iter();
        let luns = targets.flat_map(|t| t.luns.iter().map(|(n, lun)| (t.name.as_str(), *n, lun)));
        let uses = luns.filter(|(_, _, lun)| self.config.backend(lun).name == backend);
        uses.map(|(target, number, _)| (target, number)).collect()
    }

    /// A few words about the object at a path.
    fn summary(&self, segments: &[String], found: Found<'_>) -> String {
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        match segments[..] {
            [] => {
                let status = &self.status;
                let sessions = count(status.sessions, "session");
                format!(
                    "riserd {}, up {} s, {sessions}",
                    status.version, status.uptime
                )
            }
            ["backends", name] => {
                // By the configuration, not by the targets that are served: a backend that cannot
                // be opened has LUNs as well.
                let users = self.users(name).len();
                format!("{}, {}", scalars(found), count(users, "LUN"))
            }
            ["targets", name] => {
                let iqn = self.target(name).and_then(|t| t.iqn.as_ref());
                let iqn = iqn.map_or_else(String::new, |iqn| format!("{iqn}, "));
                let connections = self.sessions_of(name).len();
                format!("{iqn}{}", count(connections, "connection"))
            }
            ["targets", name, "access"] => match self.target(name).map(|t| &t.access) {
                Some(Access::Open) => "open to all initiators".to_owned(),
                Some(Access::Rules(rules)) if !rules.is_empty() => count(rules.len(), "rule"),
                _ => "no initiator".to_owned(),
            },
            ["targets", name, "luns", number] => {
                let mut words = scalars(found);
                if let Some((lun, live)) = self.lun(name, number) {
                    let read_only = if lun.read_only { ", read-only" } else { "" };
                    words = format!("{words}, {}{read_only}", bytes(lun.size));
                    if let Some(live) = live.filter(|live| live.queue_depth > 0) {
                        words = format!("{words}, {} under way", live.queue_depth);
                    }
                }
                words
            }
            [.., "chap"] | ["discovery_chap"] => {
                let of = |key| found.children().into_iter().find(|(name, _)| name == key);
                let users = of("users").map_or(0, |(_, users)| users.children().len());
                let mutual = if of("mutual").is_some() {
                    ", mutual"
                } else {
                    ""
                };
                format!("{}{mutual}", count(users, "user"))
            }
            _ => match found.kind() {
                Kind::Map(_) | Kind::List(_) => found.children().len().to_string(),
                _ if found.value.is_none() => "defaults".to_owned(),
                _ => scalars(found),
            },
        }
    }

    /// The daemon's data about the object at a path; null where there are none.
    fn live(&self, segments: &[String]) -> Value {
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        match segments[..] {
            [] => json!(self.status),
            ["backends", name] => {
                let users = self.users(name).into_iter();
                let used = users.map(|(target, number)| {
                    let mut used = json!({ "target": target, "lun": number });
                    merge(&mut used, self.lun_facts(target, &number.to_string()));
                    used
                });
                json!({ "used_by": used.collect::<Vec<_>>() })
            }
            ["targets", name] => {
                let connections = self.sessions_of(name).into_iter();
                let connections = connections.map(|s| {
                    json!({
                        "initiator": s.initiator, "peer": s.peer, "protocol": s.protocol,
                        "state": s.state, "in_flight": s.in_flight,
                    })
                });
                json!({ "connections": connections.collect::<Vec<_>>() })
            }
            ["targets", name, "portals", portal] => self.portal(name, portal),
            ["targets", name, "luns", number] => self.lun_facts(name, number),
            _ => Value::Null,
        }
    }

    /// The names of an SRP portal, of which those that are not set are derived.
    fn portal(&self, target: &str, portal: &str) -> Value {
        let view = self.targets.iter().find(|t| t.name == target);
        let mut portals = view.into_iter().flat_map(|t| &t.portals);
        let found = portals.find(|p| format!("{}:{}", p.protocol, p.listen) == portal);
        json!(found.and_then(|found| found.names.as_ref()))
    }

    fn lun_facts(&self, target: &str, number: &str) -> Value {
        let Some((lun, live)) = self.lun(target, number) else {
            return Value::Null;
        };
        let mut facts = json!(lun);
        if let Some(live) = live {
            let sum = |of: fn(&riser_admin_api::live::LiveOp) -> u64| {
                live.ops.values().map(of).sum::<u64>()
            };
            let counted = json!({
                "queue_depth": live.queue_depth,
                "commands": sum(|op| op.commands),
                "bytes": sum(|op| op.bytes),
                "errors": live.errors,
            });
            merge(&mut facts, counted);
            if live.reservations != LiveReservations::default() {
                merge(&mut facts, json!({ "reservations": live.reservations }));
            }
        }
        facts
    }
}

/// Adds the keys of another object.
fn merge(object: &mut Value, more: Value) {
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        object.extend(more);
    }
}

fn count(number: usize, of: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {of}{plural}")
}

/// The set ones of an object's own keys, on one line. Secrets are masked.
fn scalars(found: Found<'_>) -> String {
    let Some(Value::Object(entries)) = found.value else {
        return String::new();
    };
    let word = |(key, value): (&String, &Value)| {
        let value = masked(value, key);
        match &value {
            Value::String(text) => Some(format!("{key}={text}")),
            Value::Object(_) => None,
            Value::Array(items) if items.iter().any(Value::is_object) => None,
            other => Some(format!("{key}={}", to_yaml(other).trim_end())),
        }
    };
    entries
        .iter()
        .filter_map(word)
        .collect::<Vec<_>>()
        .join(" ")
}

/// A tree of objects, a line each.
#[must_use]
pub fn tree_text(node: &Node) -> String {
    let mut lines = Vec::new();
    collect(node, "", "  ", &mut lines);
    let widest = lines.iter().map(|(name, _)| name.chars().count()).max();
    let widest = widest.unwrap_or(0) + 3;
    let line = |(name, summary): &(String, &str)| {
        let dots = ".".repeat(widest - name.chars().count());
        format!("{name} {dots} [{summary}]")
    };
    lines.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Names and summaries, with what stands before a name in the tree, and before those beneath it.
fn collect<'a>(node: &'a Node, before: &str, beneath: &str, lines: &mut Vec<(String, &'a str)>) {
    lines.push((format!("{before}o- {}", node.name), &node.summary));
    let last = node.children.len().saturating_sub(1);
    for (n, child) in node.children.iter().enumerate() {
        let bar = if n < last { "| " } else { "  " };
        collect(child, beneath, &format!("{beneath}{bar}"), lines);
    }
}

/// An object in full, in lines.
#[must_use]
pub fn info_text(info: &Info) -> String {
    let mut text = info.path.clone();
    if let Some(description) = &info.description {
        text = format!("{text}: {description}");
    }
    for (title, value) in [("set", &info.config), ("live", &info.live)] {
        if !value.is_null() {
            let lines = to_yaml(value);
            let lines = lines.trim_end().replace('\n', "\n  ");
            text = format!("{text}\n\n{title}:\n  {lines}");
        }
    }
    if !info.unset.is_empty() {
        text.push_str("\n\nnot set:");
    }
    for (key, what) in &info.unset {
        text = format!("{text}\n  {key}: {what}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, children: Vec<Node>) -> Node {
        Node {
            path: String::new(),
            name: name.to_owned(),
            summary: format!("a {name}"),
            children,
        }
    }

    #[test]
    fn a_tree_is_drawn_with_its_branches() {
        let leaf = |name| node(name, Vec::new());
        let root = node(
            "/",
            vec![
                node("b", vec![leaf("x")]),
                node("t", vec![leaf("y"), leaf("z")]),
            ],
        );
        let expected = "\
o- / ....... [a /]
  o- b ..... [a b]
  | o- x ... [a x]
  o- t ..... [a t]
    o- y ... [a y]
    o- z ... [a z]";
        assert_eq!(tree_text(&root), expected);
    }
}
