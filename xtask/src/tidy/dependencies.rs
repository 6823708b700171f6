//! Dependencies that a manifest declares and no source uses.
//!
//! A dependency is used where its name begins a path or a `use` declaration, in code, a macro's
//! arguments or an attribute. A normal dependency has to be used by the product, since tests have
//! their own list.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::lexical::{Kind, Token};
use super::sources::{Package, Purpose};
use crate::Failure;

/// The lists of a manifest, and whether each is for the product.
const LISTS: [(&str, bool); 3] = [
    ("dependencies", true),
    ("dev-dependencies", false),
    ("build-dependencies", true),
];

/// Names each unused dependency, after the package that declares it.
pub(crate) fn unused(root: &Path, packages: &[Package]) -> Result<Vec<String>, Failure> {
    let mut unused = Vec::new();
    let mut inherited = BTreeSet::new();
    for package in packages {
        for (list, is_for_product) in LISTS {
            let used = used(package, is_for_product);
            for (name, declared) in declared(&package.manifest, list) {
                if !used.contains(&plain(name)) {
                    unused.push(format!("dependency {}: {name}", package.name));
                }
                // What no member inherits is unused although every member's own list is right.
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
            unused.push(format!("dependency of the workspace: {name}"));
        }
    }
    Ok(unused)
}

/// The entries of a list, those for single platforms included.
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

/// A name without separators: the crate of the package `md-5` is `md5`.
fn plain(name: &str) -> String {
    name.replace(['-', '_'], "")
}

/// Names that paths begin with, in the product or anywhere in a package.
fn used(package: &Package, is_for_product: bool) -> BTreeSet<String> {
    // A package of nothing but tests has no product.
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
            let goes_on = tokens.get(at + 1).is_some_and(|next| next.is_punct(':'))
                && tokens.get(at + 2).is_some_and(|next| next.is_punct(':'));
            let before = at.checked_sub(1).map(|before| &tokens[before]);
            let is_used = before.is_some_and(|b| b.is_ident("use") || b.is_ident("crate"));
            if (goes_on || is_used) && is_counted(token) {
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
    fn dependencies_are_used_where_their_list_says() {
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
