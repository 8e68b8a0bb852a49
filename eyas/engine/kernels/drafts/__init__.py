"""Drafts on the device: chains, trees and lookups, and the verdict of a round."""
