"""Rights of service accounts, read from manifests of Roles, ClusterRoles and their bindings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
Right = tuple[str, str, str]  # verb, group and resource


@dataclass(frozen=True)
class Ask:
    verb: str
    group: str
    resource: str  # with its subresource: ``pods/binding``
    namespace: str


@dataclass
class Rights:
    """The rights; ``asked`` has the allowed requests, so a rule that none of them needs is superfluous."""

    manifests: list[Json]
    tokens: dict[str, tuple[str, str]]  # token: namespace and name of a service account
    asked: set[Ask] = field(default_factory=set)
    refused: list[Ask] = field(default_factory=list)

    @classmethod
    def of(cls, manifests: Iterable[Json], tokens: dict[str, tuple[str, str]]) -> Rights:
        return cls([m for m in manifests if m], dict(tokens))

    @classmethod
    def granting(cls, here: Iterable[Right], everywhere: Iterable[Right], namespace: str) -> Rights:
        """Return rights in a namespace and in the cluster for the account ``broker`` with the token ``t``."""
        meta, found = {"name": "broker", "namespace": namespace}, []
        for kind, rights in (("Role", here), ("ClusterRole", everywhere)):
            rules = [
                {"verbs": [verb], "apiGroups": [group], "resources": [resource]}
                for verb, group, resource in rights
            ]
            bound = {"roleRef": {"kind": kind, "name": "broker"}, "subjects": [meta]}
            found += [
                {"kind": kind, "metadata": meta, "rules": rules},
                {"kind": f"{kind}Binding", "metadata": meta, **bound},
            ]
        return cls(found, {"t": (namespace, "broker")})

    def allows(self, token: str, ask: Ask) -> bool:
        """Return whether the account of ``token`` may do this."""
        allowed = self.would_allow(token, ask)
        if allowed:
            self.asked.add(ask)
        else:
            self.refused.append(ask)
        return allowed

    def would_allow(self, token: str, ask: Ask) -> bool:
        return any(_covers(rule, ask) for rule in self._rules(self.tokens[token], ask.namespace))

    def _rules(self, account: tuple[str, str], namespace: str) -> Iterable[Json]:
        for binding in self.manifests:
            kind = binding["kind"]
            if kind not in ("RoleBinding", "ClusterRoleBinding"):
                continue
            place = binding["metadata"].get("namespace", "")
            subjects = {(s.get("namespace", ""), s["name"]) for s in binding["subjects"]}
            if account not in subjects or (kind == "RoleBinding" and place != namespace):
                continue
            for role in self.manifests:
                same_place = role["metadata"].get("namespace", "") == place or role["kind"] == "ClusterRole"
                named = role["kind"], role["metadata"]["name"]
                if named == (binding["roleRef"]["kind"], binding["roleRef"]["name"]) and same_place:
                    yield from role["rules"]


def _covers(rule: Json, ask: Ask) -> bool:
    pairs = (("apiGroups", ask.group), ("resources", ask.resource), ("verbs", ask.verb))
    return all(value in rule[key] or "*" in rule[key] for key, value in pairs)
