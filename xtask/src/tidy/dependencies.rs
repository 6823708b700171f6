//! Finds dependencies in a manifest that are not used by the source code.
//!
//! A dependency is used if its name is the first part of a path or `use` declaration in code, macro
//! arguments or an attribute. A normal dependency must be used by the product itself, because tests
//! have their own list.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::lexical::{Kind, Token};
use super::sources::{Package, Purpose};
use crate::Failure;

/// Dependency lists in a manifest. The flag is set if the list is for the product.
const LISTS: [(&str, bool); 3] = [
    ("dependencies", true),
    ("dev-dependencies", false),
    ("build-dependencies", true),
];

pub(crate) fn unused(root: &Path, packages: &[Package]) -> Result<Vec<String>, Failure> {
    let mut unused = Vec::new();
    let mut inherited = BTreeSet::new();
    for package in packages {
        for (list, is_for_product) in LISTS {
            let used = used(package, is_for_product);
            for (name, declared) in declared(&package.manifest, list) {
                if !used.contains(&plain(name)) {
                    unused.push(format!("unused dependency {}: {name}", package.name));
                }
                // A workspace dependency is unused if no package inherits it, even if the lists of
                // all packages are correct.
                if declared.get("workspace").is_some() {
                    inherited.insert(name.to_owned());
                }
            }
        }
    }
    let manifest: toml::Table = fs::read_to_string(root.join("Cargo.toml"))?.parse()?;
    let workspace = manifest.get("workspace").and_then(toml::Value::as_table);
    for (name, _) in workspace
        .into_iter()
        .flat_map(|w| declared(w, "dependencies"))
    {
        if !inherited.contains(name) {
            unused.push(format!("unused dependency of the workspace: {name}"));
        }
    }
    Ok(unused)
}

/// Returns the entries of a list, including platform-specific entries.
pub(super) fn declared<'a>(
    table: &'a toml::Table,
    list: &'a str,
) -> Vec<(&'a str, &'a toml::Value)> {
    let platforms = table.get("target").and_then(toml::Value::as_table);
    let platforms = platforms.into_iter().flat_map(toml::Table::values);
    let tables = platforms.filter_map(toml::Value::as_table).chain([table]);
    let lists = tables.filter_map(|table| table.get(list)?.as_table());
    lists
        .flatten()
        .map(|(name, value)| (name.as_str(), value))
        .collect()
}

/// Removes separators from a name: for example, the package `md-5` has the crate `md5`.
fn plain(name: &str) -> String {
    name.replace(['-', '_'], "")
}

fn used(package: &Package, is_for_product: bool) -> BTreeSet<String> {
    // A package that only contains tests has no product.
    let has_product = package
        .sources
        .iter()
        .any(|s| s.purpose() == Purpose::Product);
    let is_strict = is_for_product && has_product;
    let mut names = BTreeSet::new();
    for source in &package.sources {
        let is_counted =
            |token: &Token| !is_strict || source.purpose_of(token.line) != Purpose::Test;
        let tokens = &source.text.tokens;
        for (at, token) in tokens.iter().enumerate() {
            let Kind::Ident(name) = &token.kind else {
                continue;
            };
            let is_path = tokens.get(at + 1).is_some_and(|next| next.is_punct(':'))
                && tokens.get(at + 2).is_some_and(|next| next.is_punct(':'));
            let before = at.checked_sub(1).map(|before| &tokens[before]);
            let is_used = before.is_some_and(|b| b.is_ident("use") || b.is_ident("crate"));
            if (is_path || is_used) && is_counted(token) {
                names.insert(plain(name));
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sh::Scratch;
    use crate::tidy::sources;

    #[test]
    fn dependency_use_matches_its_list() {
        let scratch = Scratch::new("tidy-dependencies").unwrap();
        let manifest = "[package]\nname = \"a\"\n[dependencies]\nused-1 = \"1\"\nonly-in-tests = \"1\"\n\
                        macros.workspace = true\n[dev-dependencies]\nchecks = \"1\"\nnever = \"1\"\n\
                        [target.'cfg(unix)'.dependencies]\nidle = \"1\"\n[workspace.dependencies]\nmacros = \"1\"\nnom = \"1\"\n";
        let source = "use used1::Two;\n#[macros::derive]\nfn f() {}\n\
                      #[cfg(test)]\nmod tests { use only_in_tests; fn t() { x!(checks::c()); } }\n";
        fs::create_dir(scratch.join("src")).unwrap();
        fs::write(scratch.join("Cargo.toml"), manifest).unwrap();
        fs::write(scratch.join("src/lib.rs"), source).unwrap();
        let packages = sources::read(scratch.path()).unwrap();
        let found = unused(scratch.path(), &packages).unwrap();
        let found: Vec<_> = found.iter().filter_map(|f| f.split_once(": ")).collect();
        let found: Vec<_> = found.into_iter().map(|(_, what)| what).collect();
        let expected = ["idle", "only-in-tests", "never", "nom"];
        assert_eq!(found, expected);
    }
}
