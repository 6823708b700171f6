//! Finds the functions in a file based on its syntax.

use std::ops::RangeInclusive;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// A function with a body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Function {
    /// Function name, including the name of its type if any.
    pub(crate) name: String,
    /// Lines from the signature to the closing brace.
    pub(crate) lines: RangeInclusive<usize>,
    /// Number of parameters, including `self`.
    pub(crate) parameters: usize,
    /// Maximum nesting depth of conditions, loops and closures.
    pub(crate) depth: usize,
}

impl Function {
    pub(crate) fn len(&self) -> usize {
        self.lines.end() - self.lines.start() + 1
    }
}

/// Returns all functions in a file, including nested functions.
pub(crate) fn functions(syntax: &syn::File) -> Vec<Function> {
    let mut found = Found::default();
    found.visit_file(syntax);
    found.functions
}

#[derive(Default)]
struct Found {
    functions: Vec<Function>,
    /// Type or trait that contains the current function.
    owner: Option<String>,
}

impl Found {
    fn add_function(
        &mut self,
        visibility: &syn::Visibility,
        signature: &syn::Signature,
        body: &syn::Block,
    ) {
        // Don't include attributes and documentation, which belong to the item.
        let start = match visibility {
            syn::Visibility::Inherited => signature.span(),
            visibility => visibility.span(),
        };
        let mut nesting = Nesting::default();
        nesting.visit_block(body);
        let name = signature.ident.to_string();
        self.functions.push(Function {
            name: match &self.owner {
                Some(owner) => format!("{owner}::{name}"),
                None => name,
            },
            lines: start.start().line..=body.brace_token.span.close().end().line,
            parameters: signature.inputs.len(),
            depth: nesting.deepest,
        });
    }

    fn within(&mut self, owner: Option<String>, visit: impl FnOnce(&mut Self)) {
        let before = std::mem::replace(&mut self.owner, owner);
        visit(self);
        self.owner = before;
    }
}

impl<'ast> Visit<'ast> for Found {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.add_function(&item.vis, &item.sig, &item.block);
        self.within(None, |found| visit::visit_item_fn(found, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add_function(&item.vis, &item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(body) = &item.default {
            self.add_function(&syn::Visibility::Inherited, &item.sig, body);
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let owner = match &*item.self_ty {
            syn::Type::Path(path) => path.path.segments.last().map(|s| s.ident.to_string()),
            _ => None,
        };
        self.within(owner, |found| visit::visit_item_impl(found, item));
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        let owner = Some(item.ident.to_string());
        self.within(owner, |found| visit::visit_item_trait(found, item));
    }
}

/// Measures the nesting depth of a function body. `else if` is at the same level as `if`, and
/// nested items are measured separately.
#[derive(Default)]
struct Nesting {
    depth: usize,
    deepest: usize,
}

impl Nesting {
    fn deeper(&mut self, visit: impl FnOnce(&mut Self)) {
        self.depth += 1;
        self.deepest = self.deepest.max(self.depth);
        visit(self);
        self.depth -= 1;
    }
}

impl<'ast> Visit<'ast> for Nesting {
    fn visit_expr_if(&mut self, branch: &'ast syn::ExprIf) {
        self.deeper(|nesting| {
            // Use a loop for the `else if` chain: if we visit it as an expression, each would add
            // another level.
            let mut branch = branch;
            loop {
                nesting.visit_expr(&branch.cond);
                nesting.visit_block(&branch.then_branch);
                match branch.else_branch.as_ref().map(|(_, other)| &**other) {
                    Some(syn::Expr::If(next)) => branch = next,
                    Some(other) => break nesting.visit_expr(other),
                    None => break,
                }
            }
        });
    }

    fn visit_expr_match(&mut self, node: &'ast syn::ExprMatch) {
        self.deeper(|nesting| visit::visit_expr_match(nesting, node));
    }

    fn visit_expr_for_loop(&mut self, node: &'ast syn::ExprForLoop) {
        self.deeper(|nesting| visit::visit_expr_for_loop(nesting, node));
    }

    fn visit_expr_while(&mut self, node: &'ast syn::ExprWhile) {
        self.deeper(|nesting| visit::visit_expr_while(nesting, node));
    }

    fn visit_expr_loop(&mut self, node: &'ast syn::ExprLoop) {
        self.deeper(|nesting| visit::visit_expr_loop(nesting, node));
    }

    fn visit_expr_closure(&mut self, node: &'ast syn::ExprClosure) {
        self.deeper(|nesting| visit::visit_expr_closure(nesting, node));
    }

    fn visit_item(&mut self, _: &'ast syn::Item) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn function_length_excludes_attributes() {
        let source = "/// A doc.\n#[inline]\npub fn f(a: u8,\n    b: u8) {\n}\n\
                      impl T<u8> {\n    const fn g(&self) { fn h() {} }\n}\ntrait U { fn i(); fn j() {} }\n";
        let found = functions(&syn::parse_file(source).unwrap());
        let shown: Vec<_> = found
            .iter()
            .map(|f| (&*f.name, f.lines.clone(), f.parameters))
            .collect();
        assert_eq!(
            shown,
            [
                ("f", 3..=5, 2),
                ("T::g", 7..=7, 1),
                ("T::h", 7..=7, 0),
                ("U::j", 9..=9, 0)
            ]
        );
        assert_eq!(found[0].len(), 3);
    }

    #[test]
    fn depth_counts_conditions_loops_closures() {
        let depth = |body: &str| {
            let source = format!("fn f() {{ {body} }}");
            functions(&syn::parse_file(&source).unwrap())[0].depth
        };
        assert_eq!(depth("{ { g(); } }"), 0);
        assert_eq!(depth("if a {} else if b {} else if c {} else { d }"), 1);
        assert_eq!(depth("if a {} else if b { loop { } }"), 2);
        assert_eq!(depth("for a in b { match c { _ => d(|| while e {}) } }"), 4);
        assert_eq!(depth("fn g() { if a {} }"), 0);
    }
}
