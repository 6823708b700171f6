//! Checks that packages don't have direct or indirect dependencies on packages in a higher layer.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::dependencies::declared;
use super::sources::Package;
use crate::cases;

/// Packages, and the dependencies that are not allowed.
#[derive(Deserialize)]
struct Layer {
    packages: Vec<String>,
    forbidden: Vec<String>,
}

fn layers() -> Vec<Layer> {
    cases::read(include_str!("../../cases/layers.toml"))
}

pub(crate) fn crossings(packages: &[Package]) -> Vec<String> {
    let mut known = BTreeMap::new();
    for package in packages {
        let name = package.manifest.get("package").and_then(|p| p.get("name"));
        if let Some(name) = name.and_then(toml::Value::as_str) {
            let needs = declared(&package.manifest, "dependencies");
            known.insert(name, needs.into_iter().map(|(name, _)| name).collect());
        }
    }
    let (layers, mut crossings) = (layers(), Vec::new());
    for Layer {
        packages,
        forbidden,
    } in &layers
    {
        for package in packages {
            follow(&known, vec![package], forbidden, &mut crossings);
        }
    }
    crossings
}

/// Follows the dependencies of the last package on a path.
fn follow<'a>(
    known: &BTreeMap<&'a str, Vec<&'a str>>,
    way: Vec<&'a str>,
    forbidden: &[String],
    crossings: &mut Vec<String>,
) {
    let needs = way.last().and_then(|last| known.get(last));
    for need in needs.into_iter().flatten() {
        let mut way = way.clone();
        way.push(need);
        // Don't continue from here: we only need the shortest path, because this is the dependency
        // that should be removed.
        if forbidden.iter().any(|name| name == need) {
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
    fn forbidden_dependency_path_is_reported() {
        let known = BTreeMap::from([("a", vec!["serde", "b"]), ("b", vec!["riser-target"])]);
        let mut found = Vec::new();
        follow(&known, vec!["a"], &layers()[0].forbidden, &mut found);
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
        for package in layers().iter().flat_map(|layer| &layer.packages) {
            assert!(known(package), "{package}");
        }
        assert_eq!(crossings(&packages), Vec::<String>::new());
    }
}
