//! Packages that must not depend on others, directly or through more of the workspace.

use std::collections::BTreeMap;

use super::dependencies::declared;
use super::sources::Package;

/// Packages, and what they must not link. Who edits configurations or asks a daemon needs none of
/// its own.
const FORBIDDEN: [(&str, &[&str]); 3] = [
    ("riser-config", DAEMON),
    ("riser-admin-api", DAEMON),
    ("riser-configfs-emu", DAEMON),
];

/// The parts of a daemon: the target, its devices and rings, and its servers.
const DAEMON: &[&str] = &[
    "riser-target",
    "riser-transport",
    "riser-reactor",
    "riser-memory",
    "axum",
    "io-uring",
    "prometheus",
];

/// Names each dependency of the products that must not be, with the way to it.
pub(crate) fn crossings(packages: &[Package]) -> Vec<String> {
    let mut known = BTreeMap::new();
    for package in packages {
        let name = package.manifest.get("package").and_then(|p| p.get("name"));
        if let Some(name) = name.and_then(toml::Value::as_str) {
            let needs = declared(&package.manifest, "dependencies");
            known.insert(name, needs.into_iter().map(|(name, _)| name).collect());
        }
    }
    let mut crossings = Vec::new();
    for (package, forbidden) in FORBIDDEN {
        follow(&known, vec![package], forbidden, &mut crossings);
    }
    crossings
}

/// Follows the dependencies of the last package of a way.
fn follow<'a>(
    known: &BTreeMap<&'a str, Vec<&'a str>>,
    way: Vec<&'a str>,
    forbidden: &[&str],
    crossings: &mut Vec<String>,
) {
    let needs = way.last().and_then(|last| known.get(last));
    for need in needs.into_iter().flatten() {
        let mut way = way.clone();
        way.push(need);
        // Not followed beyond: what a forbidden package needs is its own affair, and the shortest
        // way is what has to be cut.
        if forbidden.contains(need) {
            crossings.push(format!("layer {}", way.join(" → ")));
        } else {
            follow(known, way, forbidden, crossings);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root;
    use crate::tidy::sources;

    #[test]
    fn a_way_to_a_daemon_is_named() {
        let known = BTreeMap::from([("a", vec!["serde", "b"]), ("b", vec!["riser-target"])]);
        let mut found = Vec::new();
        follow(&known, vec!["a"], DAEMON, &mut found);
        assert_eq!(found, ["layer a → b → riser-target"]);
    }

    #[test]
    fn who_edits_configurations_links_no_daemon() {
        let packages = sources::read(&root()).unwrap();
        let known = |name: &str| {
            packages.iter().any(|package| {
                let table = package.manifest.get("package").and_then(|p| p.get("name"));
                table.and_then(toml::Value::as_str) == Some(name)
            })
        };
        for (package, _) in FORBIDDEN {
            assert!(known(package), "{package}");
        }
        assert_eq!(crossings(&packages), Vec::<String>::new());
    }
}
