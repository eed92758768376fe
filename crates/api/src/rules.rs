//! CEL rules and maximum lengths by which the API server itself rejects invalid objects.
//!
//! # Guarantees
//! - The message of a rule says what is wrong and what to write instead. A rule that needs a well-formed value accepts
//!   malformed values, because another rule rejects them. So one mistake causes one message, and never a CEL runtime
//!   error.
//! - Even the longest lists stay within the cost budgets of the API server. The budget for the estimated cost is
//!   10,000,000 units per rule. The budget for the real cost is 1,000,000 units per call and 10,000,000 units per
//!   object. The API server can estimate the cost only of values whose size is bounded. So each list and each text has
//!   a maximum length, and no text is built from parts of unknown length.
//!
//! # Caveats
//! - A change that raises the estimated cost of a rule can make older API servers reject the CRD.
//! - CEL cannot compare which of two addresses is higher. [`is_ordered`] compares prefixes instead.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray, ValidationRule,
};
use kube::core::Rule;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

/// Maximum length of a CIDR as text: an IPv6 address of 39 characters and `/128`.
const CIDR_LENGTH: u32 = 43;
/// Maximum length of an IPv6 address as text.
const ADDRESS_LENGTH: u32 = 39;
/// Maximum length of an address range as text: two IPv6 addresses and a hyphen.
const RANGE_LENGTH: u32 = 79;
/// Maximum number of IPv4 CIDRs of a pool. Every CIDR is compared with every other CIDR, so the cost of a call grows
/// with the square of this number.
const MOST_IPV4_CIDRS: u32 = 256;
/// Maximum number of IPv6 CIDRs of a pool: half as many as for IPv4, because IPv6 CIDRs are longer texts.
const MOST_IPV6_CIDRS: u32 = 128;
const MOST_RESERVED: u32 = 128;
const MOST_REQUIREMENTS: u32 = 32;
const MOST_VALUES: u32 = 64;
/// Maximum length of the name of a Node.
const NODE_NAME_LENGTH: u32 = 253;
const NODE_NAME: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// Maximum length of a label key: a prefix of 253 characters, `/`, and a name of 63 characters.
const LABEL_KEY_LENGTH: u32 = 317;
const LABEL_VALUE_LENGTH: u32 = 63;
const LABEL_VALUE: &str = "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$";
const LABEL_KEY: &str =
    "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";

/// Pattern of a label key. Unlike [`LABEL_KEY`], it rejects empty parts in the domain, as Kubernetes does.
const STRICT_LABEL_KEY: &str = "^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";
/// A domain, with an optional dot at the end. The root domain `.` alone is valid, too.
const DOMAIN: &str = "^([.]|[A-Za-z0-9_]([-A-Za-z0-9_]*[A-Za-z0-9_])?([.][A-Za-z0-9_]([-A-Za-z0-9_]*[A-Za-z0-9_])?)*[.]?)$";

/// Rule on the name of a pool. The name becomes a metric label, a field of NodeSubnets and part of events, and must be
/// usable as a label value. Dots are rejected, because a name with dots could look like an address or a domain.
pub(super) fn pool_name() -> Rule {
    Rule::new("size(self.metadata.name) <= 63 && !self.metadata.name.contains('.')").message(
        "the name of a pool has at most 63 characters and no dot: choose a shorter or plainer name",
    )
}

pub(super) fn some_family() -> Rule {
    Rule::new("has(self.ipv4) || has(self.ipv6)")
        .message("a pool needs addresses: give ipv4, ipv6, or both for dual stack")
}

pub(super) fn stays(family: &str) -> Rule {
    Rule::new(format!("!has(oldSelf.{family}) || has(self.{family})"))
        .message(&*format!(
            "{family} cannot be removed, as nodes may hold ranges of it: put it back, set disabled, and add a new pool for the other family"
        ))
        .field_path(format!(".{family}"))
}

/// Rule on the name of a block. The name is derived from the block's CIDR, so that the API server rejects a second
/// object for the same CIDR.
pub(super) fn block_name() -> Rule {
    Rule::new("self.metadata.name == self.spec.cidr.replace('.', '-').replace(':', '-').replace('/', '-')")
        .message("the name of a block is its cidr with - for every other sign: blocks are written by the controller alone")
}

/// Rejects a change of the virtual machine for which a block was allocated.
pub(super) fn vmi_stays() -> Rule {
    Rule::new(
        "has(self.vmiUID) == has(oldSelf.vmiUID) && (!has(self.vmiUID) || self.vmiUID == oldSelf.vmiUID)",
    )
    .message("vmiUID is immutable: the address of another virtual machine is another block")
}

pub(super) fn block_cidr(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = allocated_cidr(generator);
    if let Some(Value::Array(rules)) = schema.get_mut("x-kubernetes-validations") {
        rules.push(rule(
            "self == oldSelf",
            "is immutable: another range is another block",
        ));
    }
    schema
}

/// A block must not be larger than the smallest CIDR of the pool. `defaults` are the default block sizes for the
/// allocation modes Blocks and NodeCIDR, in this order.
pub(super) fn block_fits(family: &str, defaults: (u8, u8)) -> Rule {
    let by_default = format!(
        "self.allocationMode == 'Blocks' ? {} : {}",
        defaults.0, defaults.1
    );
    let size = format!("has(self.{family}.blockSize) ? self.{family}.blockSize : {by_default}");
    Rule::new(format!("!has(self.{family}) || self.{family}.cidrs.all(c, !isCIDR(c) || cidr(c).prefixLength() <= ({size}))"))
        .message("a block of this size does not fit into one of the cidrs: give a blockSize that is not less than the prefix length of any of them")
        .field_path(format!(".{family}.blockSize"))
}

/// Rejects FitMaxPods in a pool that allocates blocks, because a node gets as many blocks as it needs.
pub(super) fn sizing_for_node_cidr() -> Rule {
    Rule::new("self.allocationMode == 'NodeCIDR' || !has(self.ipv4) || !has(self.ipv4.blockSizing) || self.ipv4.blockSizing == 'Fixed'")
        .message("FitMaxPods is for allocationMode NodeCIDR: leave it out, as with Blocks a node gets as many blocks as its pods need")
        .field_path(".ipv4.blockSizing")
}

/// Rejects assignments in a pool that allocates blocks, because only podCIDRs can be assigned to certain nodes.
pub(super) fn assignments_for_node_cidr() -> Rule {
    Rule::new("self.allocationMode == 'NodeCIDR' || !has(self.assignments) || size(self.assignments) == 0")
        .message("assignments are for allocationMode NodeCIDR: leave them out, or give the ranges in a pool of that mode")
        .field_path(".assignments")
}

/// Accepts the name of a Node, which is a DNS subdomain (RFC 1123).
pub(super) fn node_name(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "minLength": 1,
        "maxLength": NODE_NAME_LENGTH,
        "pattern": NODE_NAME,
    })
}

/// Accepts the ranges of an assignment: at most one CIDR of each family. The controller checks that the CIDRs of the
/// pool contain the ranges. A rule cannot do that, because its cost would grow with the number of assignments times the
/// number of CIDRs.
pub(super) fn assigned_cidrs(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": allocated_cidr(generator),
        "x-kubernetes-list-type": "atomic",
        "x-kubernetes-validations": [rule(
            "size(self) < 2 || self[0].contains(':') != self[1].contains(':')",
            "two CIDRs of one family: give one CIDR of each family of the pool",
        )],
    })
}

pub(super) fn allocation_mode_stays() -> Rule {
    Rule::new("self == oldSelf").message(
        "is immutable: add a new pool that allocates the other way, and set disabled on this one",
    )
}

pub(super) fn warm_in_order() -> Rule {
    Rule::new("self.low <= self.high")
        .message("low is more than high: blocks would be asked for and given back in turn")
}

pub(super) fn claim_has_source() -> Rule {
    Rule::new("has(self.pool) || (has(self.addresses) && size(self.addresses) > 0)")
        .message("a claim needs addresses: name a pool, or give the addresses themselves")
}

pub(super) fn claim_stays() -> Rule {
    Rule::new(
        "has(self.pool) == has(oldSelf.pool) && (!has(self.pool) || self.pool == oldSelf.pool) && has(self.addresses) == has(oldSelf.addresses) && (!has(self.addresses) || self.addresses == oldSelf.addresses)",
    )
    .message("the pool and the addresses of a claim cannot be changed, because its addresses never change: delete it, and create another")
}

/// Accepts a list of addresses with at most one of each family.
pub(super) fn addresses(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 2,
        "items": address(generator),
        "x-kubernetes-list-type": "atomic",
        "x-kubernetes-validations": [rule(
            "size(self) < 2 || self[0].contains(':') != self[1].contains(':')",
            "two addresses of one family: give at most one IPv4 and one IPv6 address",
        )],
    })
}

/// Accepts an address of either family, in canonical form.
pub(super) fn address(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "maxLength": ADDRESS_LENGTH,
        "x-kubernetes-validations": [
            rule("isIP(self)", "is not an address: write one such as 10.244.0.1 or fd00::1"),
            canonical_address(),
        ],
    })
}

pub(super) fn ipv4_gateway(_: &mut SchemaGenerator) -> Schema {
    gateway("4", "10.244.0.1")
}

pub(super) fn ipv6_gateway(_: &mut SchemaGenerator) -> Schema {
    gateway("6", "fd00::1")
}

fn gateway(family: &str, example: &str) -> Schema {
    json_schema!({
        "type": "string",
        "maxLength": ADDRESS_LENGTH,
        "x-kubernetes-validations": [
            rule(
                &format!("self == 'None' || (isIP(self) && ip(self).family() == {family})"),
                &format!("is neither None nor an IPv{family} address: write one such as {example}, or leave it out for the first usable address of each block"),
            ),
            canonical_address(),
        ],
    })
}

fn canonical_address() -> Value {
    json!({
        "rule": "!isIP(self) || ip.isCanonical(self)",
        "messageExpression": "'is not in canonical form: write %s'.format([string(ip(self))])",
    })
}

pub(super) fn ipv4_cidrs(_: &mut SchemaGenerator) -> Schema {
    cidrs(
        MOST_IPV4_CIDRS,
        "4",
        "is not an IPv4 CIDR: write an address, / and a prefix length, such as 10.244.0.0/16 (IPv6 goes under ipv6)",
    )
}

pub(super) fn ipv6_cidrs(_: &mut SchemaGenerator) -> Schema {
    cidrs(
        MOST_IPV6_CIDRS,
        "6",
        "is not an IPv6 CIDR: write an address, / and a prefix length, such as fd00:10:244::/48 (IPv4 goes under ipv4)",
    )
}

fn cidrs(most: u32, family: &str, not_a_cidr: &str) -> Schema {
    let form = format!("isCIDR(self) && cidr(self).ip().family() == {family}");
    json_schema!({
        "type": "array",
        "minItems": 1,
        "maxItems": most,
        "items": {
            "type": "string",
            "maxLength": CIDR_LENGTH,
            "x-kubernetes-validations": [
                rule(&form, not_a_cidr),
                canonical_cidr(),
                rule(
                    "!isCIDR(self) || cidr(self).prefixLength() >= 8",
                    "is wider than a /8: give narrower ranges",
                ),
                rule(
                    "!isCIDR(self) || cidr(self).prefixLength() < 8 || cidr(self).ip().isGlobalUnicast()",
                    "is not unicast space that pods can use (it is unspecified, loopback, link-local or multicast): choose another range",
                ),
            ],
        },
        "x-kubernetes-validations": [{
            // If all ranges are disjoint, each range contains exactly one range of the list: itself.
            "rule": format!("!self.all(c, isCIDR(c)) || self.all(c, {HOLDS_NO_OTHER})"),
            "messageExpression": format!(
                "'%s: other ranges of the list are the same or lie inside: keep only the wider ones'.format([self.filter(c, !{HOLDS_NO_OTHER})])"
            ),
        }],
    })
}

/// CEL expression that is true if the CIDR `c` contains no CIDR of the list except itself. The list in brackets gives
/// the parsed `c` the name `p`, so that `c` is parsed only once.
const HOLDS_NO_OTHER: &str = "[cidr(c)].all(p, self.exists_one(d, p.containsCIDR(d)))";

/// Schema of a range in a NodeSubnet. The range is already allocated, so every valid CIDR is accepted.
pub(super) fn allocated_cidr(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "maxLength": CIDR_LENGTH,
        "x-kubernetes-validations": [
            rule("isCIDR(self)", "is not a CIDR: write an address, / and a prefix length"),
            canonical_cidr(),
        ],
    })
}

pub(super) fn reserved(_: &mut SchemaGenerator) -> Schema {
    let range = format!("(self.contains('-') && isIP({LOW}) && isIP({HIGH}))");
    let canonical = format!(
        "isCIDR(self) ? string(cidr(self).masked()) == self : isIP(self) ? ip.isCanonical(self) : !{range} || (ip.isCanonical({LOW}) && ip.isCanonical({HIGH}))"
    );
    let instead = format!(
        "isCIDR(self) ? string(cidr(self).masked()) : isIP(self) ? string(ip(self)) : '%s-%s'.format([string(ip({LOW})), string(ip({HIGH}))])"
    );
    let same_family = format!("ip({LOW}).family() == ip({HIGH}).family()");
    json_schema!({
        "type": "array",
        "maxItems": MOST_RESERVED,
        "x-kubernetes-list-type": "set",
        "items": {
            "type": "string",
            "maxLength": RANGE_LENGTH,
            "x-kubernetes-validations": [
                rule(
                    &format!("isCIDR(self) || isIP(self) || {range}"),
                    "is not a CIDR, an address or a range: write 10.244.0.0/24, 10.244.1.1 or 10.244.2.1-10.244.2.9",
                ),
                {
                    "rule": canonical,
                    "messageExpression": format!("'is not in canonical form: write %s'.format([{instead}])"),
                },
                rule(
                    &format!("!{range} || {same_family}"),
                    "is a range from one family to the other: give both ends of the same family",
                ),
                {
                    "rule": format!("!{range} || !({same_family}) || {}", is_ordered()),
                    "messageExpression": format!(
                        "'is a range that ends before it begins: write %s-%s'.format([{HIGH}, {LOW}])"
                    ),
                },
            ],
        },
    })
}

/// The gateway must lie in the pool's ranges, or meet the CEL expression in the argument `or`. Pods cannot reach a
/// gateway outside of these ranges, unless the dataplane makes it reachable in another way. A gateway that does not
/// change is always accepted, even if other parts of the object change.
pub(super) fn gateway_inside(family: &str, or: &str) -> Rule {
    let number = family.trim_start_matches("ipv");
    let gateway = format!("self.{family}.gateway");
    let old = format!("oldSelf.value().{family}");
    let is_old = format!(
        "oldSelf.hasValue() && has({old}) && has({old}.gateway) && {old}.gateway == {gateway}"
    );
    Rule::new(format!(
        "!has(self.{family}) || !has({gateway}) || !isIP({gateway}) || ip({gateway}).family() != {number} || {or}(has(self.addressPrefix) && self.addressPrefix == 'Host') || ({is_old}) || self.{family}.cidrs.exists(c, isCIDR(c) && cidr(c).containsIP({gateway}))"
    ))
    .message("lies in none of the cidrs, where pods cannot reach it: give an address of the pool, leave it out for the first usable address of each block, or set addressPrefix to Host if pods have a way to it all the same")
    .field_path(format!(".{family}.gateway"))
    .optional_old_self(true)
}

/// A reserved entry must overlap a range of the pool. Otherwise the entry is a mistake, such as a wrong digit or an
/// address of another pool. If the list does not change, its entries are accepted, even if a range is removed from the
/// pool.
///
/// A `low-high` entry is checked only if both ends lie in the same /24 (IPv4) or /112 (IPv6). A wider entry could begin
/// before all CIDRs of the pool and end after them.
pub(super) fn check_reserved(spec: &mut JSONSchemaProps) {
    let old = "oldSelf.value().reserved";
    let is_old = format!("oldSelf.hasValue() && has({old}) && {old} == self.reserved");
    let entry = format!(
        "(r.contains(':') ? {} : {})",
        touches("ipv6", 6, 112),
        touches("ipv4", 4, 24)
    );
    let cidrs = |family| format!("(!has(self.{family}) || self.{family}.cidrs.all(c, isCIDR(c)))");
    let readable = format!("{} && {}", cidrs("ipv4"), cidrs("ipv6"));
    let why = "in none of the cidrs, so there is nothing to keep out: take it off the list, or correct it";
    let rule = ValidationRule {
        rule: format!(
            "!has(self.reserved) || ({is_old}) || !({readable}) || self.reserved.all(r, {entry})"
        ),
        // For very long lists the server may not evaluate the message expression, because the evaluation would cost too
        // much. In this case, the server returns this message.
        message: Some(format!("an entry is {why}")),
        message_expression: Some(format!(
            "'%s: {why}'.format([self.reserved.filter(r, !{entry})])"
        )),
        field_path: Some(".reserved".to_owned()),
        optional_old_self: Some(true),
        ..ValidationRule::default()
    };
    let rules = spec.x_kubernetes_validations.get_or_insert_default();
    rules.push(rule);
}

/// Returns a CEL expression that is true if `r` overlaps a range of the family, or if `r` cannot be checked.
fn touches(family: &str, number: u8, len: u8) -> String {
    let some = |is: &str| format!("(has(self.{family}) && self.{family}.cidrs.exists(c, {is}))");
    let (low, high) = (LOW.replace("self", "r"), HIGH.replace("self", "r"));
    let around = some("cidr(c).containsCIDR(p) || p.containsCIDR(c)");
    format!(
        "(isIP(r) ? [ip(r)].all(a, {}) : isCIDR(r) ? [cidr(r)].all(p, {around}) : !r.contains('-') || !isIP({low}) || !isIP({high}) || ip({low}).family() != {number} || [cidr({low} + '/{len}')].all(p, !p.containsIP({high}) || {around}))",
        some("cidr(c).containsIP(a)"),
    )
}

const LOW: &str = "self.substring(0, self.indexOf('-'))";
const HIGH: &str = "self.substring(self.indexOf('-') + 1)";

/// Returns a CEL expression that is true if the lower end of a range is not above the upper end.
///
/// The lower end is below the upper end if both agree in their first bits, and the next bit, the n-th, is 0 in the
/// lower and 1 in the upper end. Then the n-bit prefix of the lower end, as a CIDR, does not contain the upper end. But
/// if all bits of the upper end from the n-th on are cleared, the CIDR contains the result.
///
/// The expression uses only functions whose cost every server can estimate. Therefore the expression does not compare
/// addresses by ==. It cuts the texts of the prefix lengths out of literals, because the server estimates that a text
/// made from a number can have any length.
fn is_ordered() -> String {
    /// The tens of the numbers 0 to 128, two characters each.
    const TENS: &str = "   1 2 3 4 5 6 7 8 9101112";
    let cidr = |end: &str, n: &str| {
        format!(
            "cidr({end} + '/' + ('{TENS}'.substring({n} / 10 * 2, {n} / 10 * 2 + 2) + '0123456789'.substring({n} % 10, {n} % 10 + 1)).trim())"
        )
    };
    // The first and the last address of most ranges differ only in their lowest bits. So `exists` finds their common
    // prefix soon if it tries the longest lengths first.
    let lengths: Vec<String> = (1..=128).rev().map(|n| n.to_string()).collect();
    format!(
        "({LOW} == {HIGH} || [{}].exists(n, n <= (self.contains(':') ? 128 : 32) && [{}].all(p, p.containsIP({}.masked().ip()) && !p.containsIP({HIGH}))))",
        lengths.join(", "),
        cidr(LOW, "n"),
        cidr(HIGH, "(n - 1)"),
    )
}

/// Returns the schema of an IPPool's selectors, with rules on labels. The selectors in NodeSubnets do not have these
/// rules for two reasons. The rules would cost too much, because a NodeSubnet lists the selectors of many pools. The
/// rules would also reject the selectors of pools that are older than the rules.
pub(super) fn pool_selector(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = selector(generator);
    let labels = schema.pointer_mut("/properties/matchLabels");
    if let Some(Value::Object(labels)) = labels {
        labels.insert(
            "x-kubernetes-validations".to_owned(),
            json!([
                rule(
                    &format!("self.all(k, k.matches('{STRICT_LABEL_KEY}'))"),
                    "a key of matchLabels is no label: it is a name of at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, and may have a domain before it, such as example.com/zone",
                ),
                rule(
                    &format!("self.all(k, self[k].matches('{LABEL_VALUE}'))"),
                    "a value of matchLabels can be no label's: it is of at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, or empty",
                ),
            ]),
        );
        let values = json!({"type": "string", "maxLength": LABEL_VALUE_LENGTH});
        labels.insert("additionalProperties".to_owned(), values);
    }
    schema
}

/// Adds rules to the schema of an IPPool's DNS settings. NodeSubnets do not have these rules, for the reasons that
/// [`pool_selector`] gives: cost, and pools that are older than the rules.
pub(super) fn check_dns(dns: &mut JSONSchemaProps) {
    let domain = format!("self.matches('{DOMAIN}')");
    for (field, rule, message) in [
        (
            "nameservers",
            "isIP(self)",
            "is no address: write one such as 10.96.0.10",
        ),
        (
            "search",
            &domain,
            "is no domain: write one such as svc.cluster.local",
        ),
        (
            "domain",
            &format!("self == '' || {domain}"),
            "is no domain: write one such as cluster.local, or leave it out",
        ),
        (
            "options",
            "self.matches('^[!-~]+$')",
            "is no option of a resolver: write one an entry, without spaces, such as ndots:5",
        ),
    ] {
        let fields = dns.properties.as_mut();
        let mut schema = fields.and_then(|it| it.get_mut(field));
        if let Some(JSONSchemaProps {
            items: Some(JSONSchemaPropsOrArray::Schema(items)),
            ..
        }) = schema
        {
            schema = Some(items);
        }
        if let Some(schema) = schema {
            schema.x_kubernetes_validations = Some(vec![ValidationRule {
                rule: rule.to_owned(),
                message: Some(message.to_owned()),
                ..ValidationRule::default()
            }]);
        }
    }
}

pub(super) fn selector(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "x-kubernetes-map-type": "atomic",
        "properties": {
            "matchLabels": {
                "description": "Labels that must be there, with these values.",
                "type": "object",
                "maxProperties": MOST_REQUIREMENTS,
                "additionalProperties": label_value(),
            },
            "matchExpressions": {
                "description": "Conditions on labels, all of which must be met.",
                "type": "array",
                "maxItems": MOST_REQUIREMENTS,
                "x-kubernetes-list-type": "atomic",
                "items": requirement(),
            },
        },
    })
}

fn requirement() -> Value {
    json!({
        "type": "object",
        "required": ["key", "operator"],
        "properties": {
            "key": {
                "description": "The label.",
                "type": "string",
                "maxLength": LABEL_KEY_LENGTH,
                "pattern": LABEL_KEY,
            },
            "operator": {
                "description": "In and NotIn compare with values; Exists and DoesNotExist take none.",
                "type": "string",
                "enum": ["In", "NotIn", "Exists", "DoesNotExist"],
            },
            "values": {
                "description": "What the label is compared with.",
                "type": "array",
                "maxItems": MOST_VALUES,
                "x-kubernetes-list-type": "atomic",
                "items": label_value(),
            },
        },
        "x-kubernetes-validations": [
            rule(
                "!(self.operator in ['In', 'NotIn']) || (has(self.values) && size(self.values) > 0)",
                "In and NotIn compare with values: give at least one, or use Exists or DoesNotExist",
            ),
            rule(
                "self.operator in ['In', 'NotIn'] || !has(self.values) || size(self.values) == 0",
                "Exists and DoesNotExist take no values: remove them, or use In or NotIn",
            ),
        ],
    })
}

fn label_value() -> Value {
    json!({"type": "string", "maxLength": LABEL_VALUE_LENGTH, "pattern": LABEL_VALUE})
}

fn canonical_cidr() -> Value {
    json!({
        "rule": "!isCIDR(self) || string(cidr(self).masked()) == self",
        "messageExpression": "'is not in canonical form: write %s'.format([string(cidr(self).masked())])",
    })
}

fn rule(rule: &str, message: &str) -> Value {
    json!({"rule": rule, "message": message})
}
