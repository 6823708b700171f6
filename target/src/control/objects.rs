//! Data for `riserd ls` and `riserd info`: configuration objects with the state of a running
//! daemon.

use riser_admin_api::live::{Live, LiveLun, LiveReservations};
use riser_admin_api::view::{PortalView, ProblemView, SessionView, Status, TargetView};
use serde::Serialize;
use serde_json::{Value, json};

use crate::config::{Access, Config, Found, Kind, ObjectPath, Target, masked, to_yaml};
use crate::units::bytes;

/// The configuration and state of a running daemon.
#[derive(Debug)]
pub struct Facts {
    /// Current configuration.
    pub config: Config,
    /// Daemon status.
    pub status: Status,
    /// Active targets with their portals.
    pub targets: Vec<TargetView>,
    /// Connections and logical units.
    pub live: Live,
}

/// An object with its children.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Path from the root.
    pub path: String,
    /// Last segment of the path.
    pub name: String,
    /// Short summary.
    pub summary: String,
    /// Child objects.
    pub children: Vec<Node>,
}

/// Full description of an object.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Info {
    /// Path from the root.
    pub path: String,
    /// Description from the schema.
    pub description: Option<String>,
    /// Keys that are set, with masked secrets.
    pub config: Value,
    /// Daemon data for this object, or null if there is none.
    pub live: Value,
    /// Keys that are not set, with their descriptions.
    pub unset: Vec<(String, String)>,
}

/// Returns the object at a path with `depth` levels of children.
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
    // Keep the escapes, so that a path can be built from the tree.
    let name = path.rsplit('/').next().filter(|name| !name.is_empty());
    Node {
        name: name.unwrap_or("/").to_owned(),
        path,
        summary: facts.summary(segments, found),
        children: children.into_iter().map(child).collect(),
    }
}

/// Returns the object at a path.
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
        let sessions = self.live.sessions.iter();
        sessions.filter(|s| s.target == target).collect()
    }

    /// Returns a logical unit with its counters.
    fn lun(&self, target: &str, number: &str) -> Option<&LiveLun> {
        let number: u16 = number.parse().ok()?;
        let mut luns = self.live.luns.iter();
        luns.find(|lun| lun.target == target && lun.lun == number)
    }

    /// Returns the logical units on a backend as target name and number.
    fn users(&self, backend: &str) -> Vec<(&str, u16)> {
        let targets = self.config.targets.iter();
        let luns = targets.flat_map(|t| t.luns.iter().map(|(n, lun)| (t.name.as_str(), *n, lun)));
        let uses = luns.filter(|(_, _, lun)| self.config.backend(lun).name == backend);
        uses.map(|(target, number, _)| (target, number)).collect()
    }

    /// Returns a short summary for the object at a path.
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
                // We must use the configuration here instead of active targets, because a backend
                // that cannot be opened can be used by LUNs, too.
                let users = self.users(name).len();
                let state = state_suffix(self.problem("backend", name));
                format!("{}, {}{state}", scalars(found), count(users, "LUN"))
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
                if let Some(lun) = self.lun(name, number) {
                    let unit = &lun.unit;
                    let read_only = if unit.read_only { ", read-only" } else { "" };
                    let size = unit.size;
                    let size = size.map_or_else(String::new, |n| format!(", {}", bytes(n)));
                    let state = state_suffix(unit.problem.as_ref());
                    words = format!("{words}{size}{read_only}{state}");
                    if lun.queue_depth > 0 {
                        words = format!("{words}, {} in flight", lun.queue_depth);
                    }
                }
                words
            }
            ["targets", name, "portals", portal] => {
                let view = self.portal_view(name, portal);
                let state = state_suffix(view.and_then(|view| view.problem.as_ref()));
                format!("{}{state}", scalars(found))
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

    /// Returns the daemon data for the object at a path, or null if there is none.
    fn live(&self, segments: &[String]) -> Value {
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        match segments[..] {
            [] => json!(self.status),
            ["backends", name] => {
                let users = self.users(name).into_iter();
                let used = users.map(|(target, number)| {
                    let mut used = json!({ "target": target, "lun": number });
                    merge(&mut used, self.lun_facts(target, &number.to_string()));
                    // This is the problem of the backend, which is only shown once.
                    if let Value::Object(used) = &mut used {
                        used.remove("problem");
                    }
                    used
                });
                let mut live = json!({ "used_by": used.collect::<Vec<_>>() });
                if let Some(problem) = self.problem("backend", name) {
                    merge(&mut live, json!({ "problem": problem }));
                }
                live
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

    /// Returns an active portal by the last segment of its path.
    fn portal_view(&self, target: &str, portal: &str) -> Option<&PortalView> {
        let view = self.targets.iter().find(|t| t.name == target);
        let mut portals = view.into_iter().flat_map(|t| &t.portals);
        portals.find(|p| format!("{}:{}", p.protocol, p.listen) == portal)
    }

    /// Returns the configured or derived names of an SRP portal, and its problem.
    fn portal(&self, target: &str, portal: &str) -> Value {
        let found = self.portal_view(target, portal);
        let mut live = json!(found.and_then(|found| found.names.as_ref()));
        if let Some(problem) = found.and_then(|found| found.problem.as_ref()) {
            if live.is_null() {
                live = json!({});
            }
            merge(&mut live, json!({ "problem": problem }));
        }
        live
    }

    /// Returns the problem of a backend or another object.
    fn problem(&self, kind: &str, name: &str) -> Option<&ProblemView> {
        let mut problems = self.status.problems.iter();
        problems.find(|problem| problem.kind == kind && problem.name == name)
    }

    fn lun_facts(&self, target: &str, number: &str) -> Value {
        let Some(lun) = self.lun(target, number) else {
            return Value::Null;
        };
        let mut facts = json!(lun.unit);
        let total = lun.total();
        let counted = json!({
            "queue_depth": lun.queue_depth,
            "commands": total.commands,
            "bytes": total.read + total.written,
            "errors": lun.errors,
        });
        merge(&mut facts, counted);
        if lun.reservations != LiveReservations::default() {
            merge(&mut facts, json!({ "reservations": lun.reservations }));
        }
        facts
    }
}

/// Adds all keys of another object.
fn merge(object: &mut Value, more: Value) {
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        object.extend(more);
    }
}

/// Returns the state of a problem as the last part of a summary.
fn state_suffix(problem: Option<&ProblemView>) -> String {
    problem.map_or_else(String::new, |problem| format!(", {}", problem.state))
}

fn count(number: usize, of: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {of}{plural}")
}

/// Formats the scalar keys of an object that are set on a single line. Secrets are masked.
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

/// Formats a tree of objects, one per line.
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

/// Collects names and summaries, with the tree prefix for this node and for its children.
fn collect<'a>(node: &'a Node, before: &str, beneath: &str, lines: &mut Vec<(String, &'a str)>) {
    lines.push((format!("{before}o- {}", node.name), &node.summary));
    let last = node.children.len().saturating_sub(1);
    for (n, child) in node.children.iter().enumerate() {
        let bar = if n < last { "| " } else { "  " };
        collect(child, beneath, &format!("{beneath}{bar}"), lines);
    }
}

/// Formats the full description of an object.
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
    fn tree_is_drawn_with_branches() {
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
